"""``pipemorph serve``: what it refuses, who may come, and how it ends."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from served import Served, certificate, job, manifest
from waiting import until

from pipemorph.cli import main
from pipemorph.http_client import HttpClient
from pipemorph.local.results.journal import RunJournal, RunView
from pipemorph.local.served import serve
from pipemorph.local.served.serve import JoinTracker
from pipemorph.local.served.served_run import ServeOptions, parse_listen
from pipemorph.local.service import ControlService
from pipemorph.views.status.job_metrics import remove_job_series, update_job_metrics


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def start(*options: str, **spec: Any) -> Served:
            host = Served(tmp_path, manifest(**spec), *options)
            stack.callback(host.stop)
            return host

        yield start


# --- what is refused --------------------------------------------------------------------------


def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line with which it refuses its options."""
    file = tmp_path / "job.json"
    file.write_text(json.dumps(manifest()))
    token = () if "--token-file" in options else ("--token-file", str(tmp_path / "token"))
    assert main(["serve", str(file), *token, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("pipemorph serve: ")
    return line


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.7", "train-0.example"])
def test_other_machines_need_tls(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(tmp_path, capsys, "--listen", f"{host}:7411")
    assert "without TLS the token travels in clear text; give --tls-cert and --tls-key" in line
    assert not (tmp_path / "token").exists()


def test_a_certificate_and_its_key_are_given_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = map(str, certificate(tmp_path))
    listen = ("--listen", "127.0.0.1:0")
    assert "given together" in refusal(tmp_path, capsys, *listen, "--tls-cert", cert)
    line = refusal(tmp_path, capsys, *listen, "--tls-cert", key, "--tls-key", cert)
    assert "expected a certificate and its key in PEM format" in line
    line = refusal(tmp_path, capsys, *listen, "--tls-cert", cert, "--tls-key", "/none")
    assert "No such file" in line


@pytest.mark.parametrize(
    "text", ["7411", "127.0.0.1", "127.0.0.1:", ":7411", "::1:7", "h:99999", f"h:{'9' * 5000}"]
)
def test_an_address_has_a_host_and_a_port(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "expected HOST:PORT" in refusal(tmp_path, capsys, "--listen", text)


def test_a_refused_job_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        out = tmp_path / "out"
        line = refusal(tmp_path, capsys, "--listen", listen, "--out", str(out))
    assert "cannot be used: " in line and "already in use" in line
    assert not out.exists()


def test_an_error_of_the_host_is_one_line_and_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> list[str]:
        raise KeyError("bookkeeping")

    monkeypatch.setattr(JoinTracker, "take_announcements", fails)
    file, out = tmp_path / "job.json", tmp_path / "out"
    file.write_text(json.dumps(manifest()))
    secrets, stream = (tmp_path / "token", tmp_path / "secret"), io.StringIO()
    options = ServeOptions("127.0.0.1:0", *secrets, out=out)
    assert serve.serve_job(str(file), options, stream=stream) == 1
    said = [line for line in stream.getvalue().splitlines() if "bookkeeping" in line]
    report = json.loads((out / "report.json").read_text())
    assert said == [report["reason"]]
    assert said[0].startswith("the host of the run failed: KeyError: 'bookkeeping' (test_serve.py:")
    assert (report["end"], not (out / ".lock").exists()) == ("failed", True)


def test_addresses_are_read() -> None:
    assert parse_listen("127.0.0.1:7411") == ("127.0.0.1", 7411)
    assert parse_listen("[::1]:0") == ("::1", 0)


def test_files_that_prove_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    options = ("--listen", "127.0.0.1:0", "--token-file", str(token))
    token.write_text("secret")
    token.chmod(0o644)
    line = refusal(tmp_path, capsys, *options)
    assert "can be read by other users (mode 0644); chmod 600 it" in line
    token.write_text(" \n")
    token.chmod(0o600)
    assert "holds no secret" in refusal(tmp_path, capsys, *options)
    missing = str(tmp_path / "none" / "token")
    line = refusal(tmp_path, capsys, *options[:2], "--token-file", missing)
    assert "cannot be made: No such file" in line


# --- who may come -----------------------------------------------------------------------------


class Service:
    """The part of a ControlService that a roll call uses."""

    def __init__(self) -> None:
        self.reported_at: float | None = None
        self.attempts: list[int] = []

    def begin_attempt_in_loop(self, attempt: int) -> None:
        self.attempts.append(attempt)


def join(roll: JoinTracker, rank: int, *, world: int = 4, attempt: int = 0) -> tuple[int, Any]:
    query = {"rank": str(rank), "world_size": str(world), "attempt": str(attempt)}
    reply = roll.handle_join(query, "127.0.0.1")
    return reply.status, json.loads(reply.body)


def test_ranks_are_given_their_job_and_missing_ones_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roll = JoinTracker(job(stages=4), RunJournal(), Service())  # type: ignore[arg-type]
    status, answer = join(roll, 2)
    assert (status, answer["metadata"]["name"]) == (200, "served")
    assert roll.take_announcements() == []
    monkeypatch.setattr(serve, "JOIN_SECONDS", 0.0)
    join(roll, 0)
    (line,) = roll.take_announcements()
    assert line.startswith("2 of 4 ranks have joined in 0 s; missing: 1, 3. Each needs")
    assert roll.take_announcements() == [], "it is announced once"


def test_all_ranks_have_come() -> None:
    roll = JoinTracker(job(stages=2), RunJournal(), Service())  # type: ignore[arg-type]
    for rank in (1, 0):
        assert roll.take_announcements() == []
        join(roll, rank, world=2)
    assert roll.take_announcements() == ["all 2 ranks have joined"]


def test_ranks_of_other_sizes_and_attempts_are_refused_and_named_once() -> None:
    service = Service()
    journal = RunJournal(RunView(state="failed"))
    roll = JoinTracker(job(stages=4), journal, service)  # type: ignore[arg-type]
    for _ in range(2):
        status, answer = join(roll, 1, world=2)
        assert status == 409
        assert answer["error"] == "this rank is of 2 ranks (WORLD_SIZE); job served has 4"
    (line,) = roll.take_announcements()
    assert line.startswith("rank 1 from 127.0.0.1 is refused: it is of 2 ranks")
    assert join(roll, 0, attempt=2)[0] == 200
    assert service.attempts == [2]
    assert journal.view.state == "starting", "what earlier ranks said counts no more"
    status, answer = join(roll, 1, attempt=1)
    assert status == 409
    assert "Set PIPEMORPH_ATTEMPT to 3" in answer["error"]
    assert roll.handle_join({"rank": "x"}, "").status == 400


# --- what it exports --------------------------------------------------------------------------


def test_a_served_job_has_the_metrics_of_a_job_in_a_cluster() -> None:
    def read(metric: str) -> float | None:
        labels = {"namespace": "lab", "name": "served"}
        return REGISTRY.get_sample_value(f"pipemorph_job_{metric}", labels)

    with ControlService(job(stages=2), RunJournal()) as service:
        service.update_metrics = update_job_metrics
        until(lambda: read("iteration") == 0.0, "no metrics")
    assert (read("slow_links"), read("recoveries")) == (0.0, 0.0)
    assert read("last_report_timestamp_seconds") is None, "no rank has reported"
    remove_job_series("lab", "served")


# --- how it ends ------------------------------------------------------------------------------


def test_files_are_made_for_their_owner_and_stay(served: Any, tmp_path: Path) -> None:
    host = served("--out", str(tmp_path / "out"))
    environment = host.environment()
    for name in ("TOKEN", "SECRET"):
        file = Path(environment[f"PIPEMORPH_{name}_FILE"])
        assert file.stat().st_mode & 0o777 == 0o600
        assert len(file.read_text().strip()) >= 32
    before = (tmp_path / "token").read_text()
    host.process.send_signal(signal.SIGINT)
    assert host.ended() == 130
    assert "Traceback" not in host.output
    assert "stopped by SIGINT; the ranks train on with their plan" in host.output
    assert json.loads((tmp_path / "out" / "report.json").read_text())["end"] == "interrupted"
    again = served()
    again.environment()
    assert (tmp_path / "token").read_text() == before


def test_its_page_says_that_it_waits_for_ranks(served: Any) -> None:
    host = served("--watch")
    host.says("PIPEMORPH_SECRET_FILE=")
    host.says("watch: ")
    url = host.output.partition("watch: ")[2].split()[0]
    answer = HttpClient(url).request_blocking("view", seconds=10.0)
    document = json.loads(answer.body)
    assert (document["status"]["state"], document["wanted"]) == ("Starting", 12)
    assert document["no_alternative"] == "ranks write their ops to the folder of --out"
    assert document["result"] == "the output of pipemorph serve"
    host.process.send_signal(signal.SIGINT)
    assert host.ended() == 130


def test_a_deadline_ends_it(served: Any) -> None:
    host = served(activeDeadlineSeconds=1)
    assert host.ended() == 1
    assert "not over within 1 s (spec.activeDeadlineSeconds)" in host.output
