"""The reporter of an observed rank: whatever its host does, it logs one line and goes on."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import pytest
from launch import free_port

from pipemorph.diagnose.operation import BACKWARD, FORWARD, GC, LOSS, OPTIMIZER
from pipemorph.local.observed.observed_steps import align_step, has_all_stages
from pipemorph.local.results.journal import RunJournal
from pipemorph.local.service import ControlService
from pipemorph.protocol.observed_steps import MOST_STEPS, ObservedPlace
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer.observe import step_reporter
from pipemorph_trainer.observe.observation import Observation
from pipemorph_trainer.observe.observed_rank import FinishedStep, ObservedRank
from pipemorph_trainer.observe.step_reporter import (
    StepReporter,
    describe_place,
    make_step,
)
from pipemorph_trainer.record import RecordedOp

PLACE = ObservedPlace(rank=0, stages=1, chunks=(0,), host="h")
DEADLINE = 20.0


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[FakeRank]:
    caplog.set_level(logging.WARNING, "pipemorph_trainer.observe")
    monkeypatch.setattr(step_reporter, "LAST_SECONDS", DEADLINE)
    found = FakeRank(tmp_path, caplog)
    yield found
    if found.reporter is not None:
        found.reporter.close()


class FakeRank:
    """Rank without a training."""

    def __init__(self, folder: Path, log: pytest.LogCaptureFixture) -> None:
        self.port, self.token = free_port(), folder / "token"
        self.token.write_text("secret")
        self.reporter: StepReporter | None = None
        self.environ = {
            "PIPEMORPH_INGEST_URL": f"http://127.0.0.1:{self.port}",
            "PIPEMORPH_TOKEN_FILE": str(self.token),
        }
        self._log, self._steps = log, 0

    def start(self) -> None:
        self.reporter = StepReporter.from_env(PLACE, time.time, self.environ)

    def train(self, steps: int) -> None:
        assert self.reporter is not None
        for _ in range(steps):
            now = 1000.0 + self._steps
            ops = [
                RecordedOp(FORWARD, now, 0.1, 0, 0, 0),
                RecordedOp(BACKWARD, now + 0.1, 0.2, 0, 0, 0),
            ]
            began = perf_counter()
            self.reporter.add_step(FinishedStep(self._steps, ops, now, now + 0.5))
            assert perf_counter() - began < 0.05, "the training thread waits"
            self._steps += 1

    @property
    def lines(self) -> list[str]:
        name = "pipemorph_trainer.observe"
        return [record.getMessage() for record in self._log.records if record.name == name]

    def host(self, journal: RunJournal, token: str = "secret") -> ControlService:
        return ControlService(None, journal, token=token, port=self.port)


def list_steps(journal: RunJournal) -> list[int]:
    return [each.index for each in journal.list_iterations()]


def test_reports_go_on_when_the_host_is_back(rank: FakeRank) -> None:
    first, second = RunJournal(), RunJournal()
    rank.start()
    rank.train(2)
    wait_until(lambda: rank.lines)
    with rank.host(first):
        wait_until(lambda: list_steps(first) == [0, 1])
        rank.train(1)
        wait_until(lambda: list_steps(first) == [0, 1, 2])
    rank.train(MOST_STEPS + 10)
    wait_until(lambda: len(rank.lines) == 3)
    with rank.host(second) as service:
        wait_until(lambda: len(rank.lines) == 4)
        assert rank.reporter is not None
        rank.reporter.close()
        assert service.observed is not None
        assert service.observed.finished
    # What does not fit into the queue is dropped, the oldest first.
    assert list_steps(second) == list(range(MOST_STEPS + 13))[-MOST_STEPS:]
    gone, back, *rest = rank.lines
    assert gone.startswith(f"steps are not reported to http://127.0.0.1:{rank.port} (")
    assert gone.endswith("trying again, training goes on")
    assert back.startswith("reports work again after ")
    assert [line.partition(" ")[0] for line in rest] == ["steps", "reports"]


def test_a_wrong_token_is_one_line(rank: FakeRank) -> None:
    with rank.host(RunJournal(), token="another"):
        rank.start()
        rank.train(1)
        wait_until(lambda: rank.lines)
        rank.train(5)
    (line,) = rank.lines
    assert "PIPEMORPH_TOKEN_FILE must be the --token-file of pipemorph serve" in line


def test_a_host_that_never_answers_is_one_line(
    rank: FakeRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_reporter, "REQUEST_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", rank.port)):
        rank.start()
        rank.train(3)
        wait_until(lambda: rank.lines)
        rank.train(3)
        assert rank.reporter is not None
        began = time.monotonic()
        rank.reporter.close()
        assert time.monotonic() - began < 1, "the end waits for a host that does not answer"
    (line,) = rank.lines
    assert "no answer within 0.1 s" in line


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PIPEMORPH_INGEST_URL": "nowhere"}, "PIPEMORPH_INGEST_URL is 'nowhere'; expected http"),
        (
            {"PIPEMORPH_TOKEN_FILE": ""},
            "PIPEMORPH_TOKEN_FILE is not set; expected the --token-file",
        ),
    ],
)
def test_unusable_variables_are_one_line(
    rank: FakeRank, environ: dict[str, str], message: str
) -> None:
    rank.environ |= environ
    rank.start()
    assert rank.reporter is None
    (line,) = rank.lines
    assert line.startswith("steps are not reported, training goes on: ")
    assert message in line


def test_an_impossible_place_ends_reports_and_not_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: FakeRank
) -> None:
    for name, value in rank.environ.items():
        monkeypatch.setenv(name, value)
    observation = Observation(tmp_path, 0)
    observation.set_place(ObservedRank(0, 0, 0, (-7,)))
    assert observation.active
    observation.stop()
    (line,) = rank.lines
    assert line.startswith("steps are not reported, training goes on: ValidationError")


@pytest.mark.parametrize(("backend", "local"), [("gloo", "3"), ("gloo", ""), ("nccl", "3")])
def test_ranks_on_processors_report_how_many_share_them(
    monkeypatch: pytest.MonkeyPatch, backend: str, local: str
) -> None:
    monkeypatch.setattr(step_reporter, "compute_crowding", lambda ranks: ranks / 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    place = describe_place(ObservedRank(5, 1, 0, (1, 3), ranks=2, backend=backend))
    assert place.crowding == (1.5 if (backend, local) == ("gloo", "3") else None)
    assert (place.stages, place.chunks, place.transport) == (4, (1, 3), backend)


def test_times_between_ops_have_their_causes() -> None:
    ops = [
        RecordedOp(GC, 0.2, 0.05),
        RecordedOp(FORWARD, 1.0, 0.1, 0, 0, 0),
        RecordedOp(LOSS, 1.1, 0.05, 0, 0, 0),
        RecordedOp(GC, 1.2, 0.01),
        RecordedOp(BACKWARD, 1.3, 0.2, 0, 0, 0),
        RecordedOp(OPTIMIZER, 1.6, 0.3),
    ]
    waits = [(0.5, 0.2), (1.2, 0.03)]
    step = make_step(FinishedStep(4, ops, began=0.0, ended=2.0, omitted=0.5, waits=waits))
    assert has_all_stages(PLACE, step)
    aligned = align_step(MeshShape(1), PLACE, step, shift=100.0)
    assert (aligned.seconds, aligned.ended_at) == (1.5, 102.0)
    assert aligned.count_waited(101.0, 101.1) == pytest.approx(0.03)
    assert aligned.count_waited(100.4, 101.1) == pytest.approx(0.23)
    assert aligned.count_waited(101.3, 102.0) == 0
    (trace,) = aligned.traces
    assert (trace.kinds, trace.durations) == ("FB", [150_000, 200_000])
    assert trace.ops[0].start == pytest.approx(101.0)
    times = trace.rank_times
    assert times is not None
    assert (times.window, times.optimizer) == (1.5, pytest.approx(0.3))
    assert (times.gc, times.pauses) == (0.05, [(200_000, 10_000)])
    assert times.data == pytest.approx(1.0 - 0.5 - 0.05)
    for rows in (ops[-1:], [*ops, RecordedOp(FORWARD, 1.0, 0.1, 0, 1, 1)]):
        assert not has_all_stages(PLACE, make_step(FinishedStep(4, rows, 0.0, 2.0)))
