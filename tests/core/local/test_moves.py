"""When ranks are asked to change places, and which layout counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipemorph.api.layout import Layout
from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.relayout import Network, Proposal
from pipemorph.local import moves as module
from pipemorph.local.moves import Move, Moves
from pipemorph.local.processes.kept import KeptFolder

SPEC = JobSpec.model_validate(
    {
        "parallelism": {"stages": 2, "replicas": 2},
        "schedule": {"microbatches": 4},
        "trainer": {"module": "m", "iterations": 9},
        "failurePolicy": {"maxRestarts": 1},
        "adaptation": {"relayout": True},
    }
)
FIRST = Layout.of(SPEC.parallelism)
OTHER = FIRST.swapped(1, 2)


class Run:
    """The host of a run, with what it tells."""

    def __init__(self, folder: Path) -> None:
        self.told: list[str] = []
        self.kept = KeptFolder(folder)
        self.moves = Moves(SPEC, self.told.append)

    def leaves(self) -> Move:
        move = Move("a wire is late", Proposal(OTHER, 2.0, 1.0, 3.0, 90, 0.0), self.moves.layout)
        self.moves.ask(move, self.kept, 0)
        assert not self.moves.decides
        return move

    def meets(self) -> None:
        word = '{"iteration": 4, "rung": "kept", "why": ""}'
        (self.kept.root / "resumed.generation-1").write_text(word)
        self.moves.look(self.kept, 1)


def test_the_new_layout_counts_when_all_have_met(tmp_path: Path) -> None:
    run = Run(tmp_path)
    move = run.leaves()
    assert (tmp_path / "leave.generation-0").exists()
    run.moves.look(run.kept, 0)
    assert move.outcome == "asked"
    run.moves.left(1)
    assert (run.moves.layout, run.moves.decides) == (OTHER, False)
    run.meets()
    assert (move.outcome, run.moves.decides) == ("moved", True)
    # A failure later on changes nothing, another attempt does.
    assert not run.moves.failed(attempt=False)
    assert run.moves.layout == OTHER
    assert run.moves.failed(attempt=True)
    assert run.moves.layout == FIRST


def test_a_failure_before_all_have_met_goes_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    move = run.leaves()
    run.moves.left(1)
    assert run.moves.failed(attempt=False)
    assert (run.moves.layout, move.outcome) == (FIRST, "went back")


def test_a_failure_before_ranks_leave_changes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    move = run.leaves()
    assert not run.moves.failed(attempt=False)
    assert (run.moves.layout, move.outcome, run.moves.decides) == (FIRST, "stayed", True)


def test_ranks_that_cannot_leave_say_why(tmp_path: Path) -> None:
    run = Run(tmp_path)
    move = run.leaves()
    (tmp_path / "stay.generation-0").write_text("rank 1: no memory")
    run.moves.look(run.kept, 0)
    assert (move.outcome, move.why, run.moves.decides) == ("stayed", "rank 1: no memory", True)
    gone = Run(tmp_path / "gone")
    move = Move("", Proposal(OTHER, 2.0, 1.0, 3.0, 90, 0.0), FIRST)
    gone.moves.ask(move, gone.kept, 0)
    assert move.outcome == "stayed"
    assert "cannot be told" in move.why
    assert gone.moves.decides


def test_ranks_stay_for_a_while_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    run = Run(tmp_path)
    move = run.leaves()
    run.moves.left(1)
    run.meets()
    run.moves.arrived(1, 4, 2.5)
    assert (move.iteration, move.seconds) == (4, 2.5)
    now = 1024.9
    assert not run.moves.decides
    now = 1025.0
    assert run.moves.decides


def test_what_does_not_pay_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = Proposal(OTHER, 2.0, 1.0, 100.0, 90, 0.0)
    monkeypatch.setattr(module, "propose", lambda *_: found)
    run = Run(tmp_path)
    network = Network((), (), (), True, 90)
    assert run.moves.consider(network, 100.0) is None
    assert run.told == []
    run.moves._wires.late[0, 1] = 0.03
    for _ in range(2):
        assert run.moves.consider(network, 100.0) is None
    (told,) = run.told
    assert "late: pods 0 and 1; 2 ranks at other places would make" in told
    assert "would save 90.0 s and cost 100.0 s" in told
