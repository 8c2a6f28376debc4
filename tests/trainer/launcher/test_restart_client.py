"""A launcher whose ingest is away, refuses it, or stands by."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from launch import free_port
from manifests import job_of
from waiting import until

from pipemorph.exits import drain_refusal_file_name, drain_request_file_name
from pipemorph.local.drain_requests import DrainRequests
from pipemorph.local.generation_runner import RankGeneration
from pipemorph.local.processes.interrupts import InterruptHandler
from pipemorph.local.processes.memory_folder import MemoryCheckpointFolder
from pipemorph.local.processes.supervision import AttemptOutcome, AttemptResult
from pipemorph.protocol import GenerationState, PodFailure, ResumedFrom
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.layout import RankLayout
from pipemorph_trainer.launcher import restart_client as meeting_module
from pipemorph_trainer.launcher.pod import Pod
from pipemorph_trainer.launcher.pod_rank_host import PodRankHost
from pipemorph_trainer.launcher.restart_client import RestartClient, make_generation_client

FIRST, NEW = RankLayout(), RankLayout(layers=(4, 2))
NEVER = 600.0


class Answers(http.server.ThreadingHTTPServer):
    """Answers every request with ``status`` and ``state``, and records the requests."""

    daemon_threads = True

    def __init__(self, status: int, state: dict[str, object]) -> None:
        self.requests: list[tuple[str, str]] = []
        self.state = state
        self.polls: list[str] = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers["Content-Length"])).decode()
                server.requests.append((self.headers["Authorization"], text))
                self.do_GET()

            def do_GET(self) -> None:
                if self.command == "GET":
                    server.polls.append(self.path)
                body = json.dumps(server.state).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


def newest(host: Answers) -> dict[str, Any]:
    """The last request that it received."""
    return json.loads(host.requests[-1][1])


@pytest.fixture
def notes() -> list[str]:
    return []


def meeting(
    tmp_path: Path,
    port: int,
    notes: list[str],
    runs: Callable[[GenerationState], bool] = lambda _: True,
) -> RestartClient:
    (tmp_path / "token").write_text("secret\n")
    url = f"http://127.0.0.1:{port}"
    client = make_generation_client(
        {"PIPEMORPH_INGEST_URL": url, "PIPEMORPH_TOKEN_FILE": str(tmp_path / "token")}, "a", "b"
    )
    assert client.base == f"{url}/v1/jobs/a/b/generation"
    return RestartClient(client, 1, 0, notes.append, runs)


def job_with(**parallelism: int) -> PipeMorphJob:
    return job_of(
        {
            "parallelism": {"stages": 2, **parallelism},
            "schedule": {"microbatches": 4},
            "trainer": {"module": "m", "iterations": 7},
            "failurePolicy": {"maxRestarts": 1},
            "adaptation": {"relayout": "layers" in parallelism},
        }
    )


def test_without_an_ingest_the_wait_has_an_end_and_says_so(
    tmp_path: Path, notes: list[str]
) -> None:
    met = meeting(tmp_path, free_port(), notes).wait_for_next_generation(
        0, None, 0.4, lambda: False
    )
    assert isinstance(met, str) and met.startswith("no ingest has answered: ")
    assert met.endswith("(waited 0 s)") and len(notes) == 1


def test_an_interrupted_wait_ends_at_once(tmp_path: Path, notes: list[str]) -> None:
    began = time.monotonic()
    met = meeting(tmp_path, free_port(), notes).wait_for_next_generation(
        0, None, NEVER, lambda: bool(notes)
    )
    assert met == "the wait was interrupted" and time.monotonic() - began < 30


def test_a_pod_that_is_refused_does_not_ask_again(tmp_path: Path, notes: list[str]) -> None:
    host = Answers(403, {"error": "attempt 0 is not the attempt in progress, 1"})
    met = meeting(tmp_path, host.server_address[1], notes).wait_for_next_generation(
        0, None, NEVER, lambda: False
    )
    assert met == (
        "the ingest refuses this pod: the ingest answered 403: "
        "attempt 0 is not the attempt in progress, 1"
    )
    ((token, request),) = host.requests
    assert token == "Bearer secret" and json.loads(request)["event"] == "gone"


def test_reports_without_a_successor_are_sent_until_acknowledged(
    tmp_path: Path, notes: list[str]
) -> None:
    host = Answers(500, {"error": "internal error"})
    pod = meeting(tmp_path, host.server_address[1], notes)
    pod.report_resumed(3, ResumedFrom(iteration=7, rung="kept"))
    until(lambda: len(host.requests) >= 3, "it is said three times")
    assert {json.loads(text)["resumed"]["iteration"] for _, text in host.requests} == {7}


def test_pods_of_other_generations_are_waited_for(tmp_path: Path, notes: list[str]) -> None:
    state = GenerationState(attempt=0, generation=0, over=True, again=0.05)
    host = Answers(200, state.model_dump())
    met = meeting(tmp_path, host.server_address[1], notes).wait_for_next_generation(
        0, None, 0.5, lambda: False
    )
    assert isinstance(met, str) and "other pods have not ended their ranks of generation 0" in met
    assert len(host.requests) > 2 and not notes


def test_a_generation_that_is_over_before_this_pod_learns_of_it_is_not_started(
    tmp_path: Path, notes: list[str]
) -> None:
    host = Answers(200, GenerationState(attempt=0, generation=3, over=True).model_dump())
    pod = meeting(tmp_path, host.server_address[1], notes)
    met = pod.wait_for_next_generation(2, None, NEVER, lambda: len(host.requests) > 2)
    assert met == "the wait was interrupted"
    generations = [json.loads(text).get("generation") for _, text in host.requests]
    assert generations[:2] == [2, 3]


def test_a_pod_without_ranks_waits_for_a_generation_that_has_some(
    tmp_path: Path, notes: list[str]
) -> None:
    """Longer than pods wait for each other, and then its copies are of an old state."""
    fewer = GenerationState(attempt=0, generation=3, excluded_replicas=(1,), again=0.05)
    host = Answers(200, fewer.model_dump())
    pod = meeting(
        tmp_path, host.server_address[1], notes, runs=lambda state: 1 not in state.excluded_replicas
    )
    assert pod.join_attempt(NEVER, lambda: False) == fewer, "it has to import before it may run"

    def turns() -> bool:
        # A request may be sent twice.
        if len(host.requests) >= 6:
            host.state |= {"generation": 4, "excluded_replicas": []}
        return False

    met = pod.wait_for_next_generation(2, None, 0.2, turns)
    assert isinstance(met, GenerationState) and met.generation == 4, met
    assert pod.missed_generation
    requests = [json.loads(text) for _, text in host.requests]
    assert [(each["generation"], each["excluded_replicas"]) for each in requests[1:3]] == [
        (2, [1]),
        (3, [1]),
    ]
    assert {each["event"] for each in requests[1:]} == {"gone"}
    assert notes == ["generation 3 runs without replicas 1; this pod waits until it is needed"]


def test_a_pod_that_did_not_learn_of_a_generation_was_not_part_of_it(
    tmp_path: Path, notes: list[str]
) -> None:
    for generation, missed in ((3, False), (4, True)):
        host = Answers(200, GenerationState(attempt=0, generation=generation).model_dump())
        pod = meeting(tmp_path, host.server_address[1], notes)
        assert isinstance(
            pod.wait_for_next_generation(2, None, NEVER, lambda: False), GenerationState
        )
        assert pod.missed_generation is missed


def test_a_launcher_passes_on_why_ranks_stay_and_asks_them_again(
    tmp_path: Path, notes: list[str]
) -> None:
    asks = GenerationState(attempt=0, generation=1, excluded_replicas=(1,), leave=True)
    host = Answers(200, asks.model_dump())
    pod = Pod(job_with(replicas=2, minReplicas=1), 0, (0,), memory_dir=tmp_path)
    folder = MemoryCheckpointFolder(tmp_path)
    client, request_file = (
        meeting(tmp_path, host.server_address[1], notes),
        tmp_path / drain_request_file_name(1),
    )
    with InterruptHandler(SimpleQueue()) as interrupts:
        site = PodRankHost(pod, [], 1.0, SimpleQueue(), interrupts, client, environ={})
    client.watch_generation(1)

    def look(what: str, found: Callable[[], bool]) -> None:
        until(lambda: (site._exchange_drain_messages(client, 1), found())[1], what)

    look("the ranks get a request", request_file.exists)
    host.state["leave"] = False
    request_file.unlink()
    (tmp_path / drain_refusal_file_name(1)).write_text("rank 2: it keeps no state")
    look("a word", lambda: bool(host.requests))
    said = json.loads(host.requests[0][1])
    assert (said["event"], said["why"]) == ("stays", "rank 2: it keeps no state")
    assert folder.read_drain_refusal(1) is None, "said once"
    look("the request is withdrawn", lambda: client.find_drain_layout(1) is None)
    request_file.unlink(missing_ok=True)
    site._exchange_drain_messages(client, 1)
    assert not request_file.exists()
    host.state["leave"] = True
    look("the ranks get it again", request_file.exists)


def test_a_launcher_asks_its_ranks_to_leave_for_other_layers_and_says_that_they_have(
    tmp_path: Path, notes: list[str]
) -> None:
    asks = GenerationState(attempt=0, generation=1, leave=True, leave_for=NEW)
    host = Answers(200, asks.model_dump())
    pod = Pod(job_with(layers=6), 1, (1,), memory_dir=tmp_path)
    life = RankGeneration(generation=1)
    client, request_file = (
        meeting(tmp_path, host.server_address[1], notes),
        tmp_path / drain_request_file_name(1),
    )
    with InterruptHandler(SimpleQueue()) as interrupts:
        site = PodRankHost(pod, [], 1.0, SimpleQueue(), interrupts, client, environ={})
        site.hang_detector.iterations_finished = 9
        client.watch_generation(1)
        until(
            lambda: (site._exchange_drain_messages(client, 1), request_file.exists())[1],
            "the ranks get a request",
        )
        assert json.loads(request_file.read_text()) == [4, 2]
        following = {"generation": 2, "leave": False, "leave_for": FIRST, "layout": NEW}
        host.state = asks.model_copy(update=following | {"layout_before": FIRST}).model_dump()
        assert site.agree_next_generation(
            life, AttemptResult(AttemptOutcome.MOVED)
        ) == RankGeneration(generation=2, layout=NEW)
        said = newest(host)
        assert (said["event"], said["finished"]) == ("gone", 9)
        assert said["left_for"] == {"layers": [4, 2]}
        assert "reached" not in said, "ranks of this life have not said how far they came"
        # The next report names what runs now.
        client.report_drain_refusal(2, "rank 2: it keeps no state")
        until(lambda: newest(host)["event"] == "stays", "the next word")
        said = newest(host)
        assert (said["layout"], said["layout_before"]) == ({"layers": [4, 2]}, {})
        # Without room for a file the ranks go on, and so does the launcher.
        host.state = asks.model_dump()
        site.drain_requests = DrainRequests(
            MemoryCheckpointFolder(tmp_path / "gone"), client, notes.append
        )
        client.watch_generation(1)
        why = f"cannot write to {tmp_path / 'gone'}: "
        until(
            lambda: (site._exchange_drain_messages(client, 1), why in newest(host).get("why", ""))[
                1
            ],
            why,
        )
        said = newest(host)
        assert (said["event"], said["generation"]) == ("stays", 1)
        host.state = asks.model_copy(update={"generation": 3, "leave": False}).model_dump()
        # One in which ranks have failed has not departed.
        assert isinstance(
            site.agree_next_generation(life, AttemptResult(AttemptOutcome.FAILED, "rank 1 failed")),
            RankGeneration,
        )
        assert "left_for" not in newest(host)
    env = site._make_changed_environment(tmp_path, RankGeneration(generation=2, layout=NEW))
    assert env == {"PIPEMORPH_LAYERS": "[4, 2]", "PIPEMORPH_PLACES": "[0, 1]"}


def test_a_launcher_hears_that_layers_count_while_its_ranks_run(
    tmp_path: Path, notes: list[str]
) -> None:
    """The launcher reports it to another ingest, which may not know it."""
    trial = GenerationState(attempt=0, generation=1, layout=NEW, layout_before=FIRST, again=0.01)
    host = Answers(200, trial.model_dump())
    pod = meeting(tmp_path, host.server_address[1], notes)
    assert pod.join_attempt(NEVER, lambda: False) == trial

    def says(generation: int) -> object:
        """Report about its layers after its request, as its ranks run."""
        host.state["generation"] = generation
        pod.watch_generation(1)
        polls = len(host.polls)
        until(lambda: len(host.polls) >= polls + 3, "it has polled")
        pod.report_failed(1, PodFailure(reason="rank 1 exited with code 1", at=1.0))
        until(lambda: newest(host)["event"] == "failed", "it says so")
        return json.loads(host.requests.pop()[1]).get("layout_before")

    assert says(1) == {}
    host.state["layout_before"] = None
    assert says(0) == {}, "that is of another generation"
    assert says(1) is None
    host.state["over"] = True  # Requests stop.


def test_a_finished_pod_reports_it_until_acknowledged(
    tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pods of replicas that are omitted would wait forever."""
    monkeypatch.setattr(meeting_module, "SEND_SECONDS", 0.2)
    host = Answers(500, {"error": "internal error"})
    meeting(tmp_path, host.server_address[1], notes).report_completed(3, lambda: False)
    requests = [json.loads(text) for _, text in host.requests]
    assert {(each["event"], each["generation"]) for each in requests} == {("completed", 3)}
    assert len(requests) > 1


def test_a_new_pod_waits_for_the_others_longer_than_for_an_ingest(
    tmp_path: Path, notes: list[str]
) -> None:
    """The others may have to be given up first."""
    host = Answers(
        200, GenerationState(attempt=0, generation=3, over=True, again=0.05).model_dump()
    )
    pod = meeting(tmp_path, host.server_address[1], notes)

    def turns() -> bool:
        # A request may be sent twice.
        if len(host.requests) >= 6:
            host.state |= {"generation": 4, "over": False}
        return False

    met = pod.join_attempt(0.05, turns, meets=NEVER)
    assert isinstance(met, GenerationState) and met.generation == 4, met
