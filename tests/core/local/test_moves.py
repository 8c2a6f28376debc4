"""When ranks are asked to change places, and which layout counts."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipemorph.api.layout import Layout
from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.ladder import Ladder
from pipemorph.control.decide.layouts import moves as module
from pipemorph.control.decide.layouts.moves import Move, Moves
from pipemorph.control.decide.layouts.relayout import Network, Proposal
from pipemorph.local import moves as asking
from pipemorph.local.generations import Life
from pipemorph.local.host import EXIT, _Host
from pipemorph.local.processes.kept import KeptFolder
from pipemorph.local.processes.supervise import End, Ending
from pipemorph.wire import ReductionHealth, SlowestEdge

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
        self.now = 1000.0
        self.moves = Moves(SPEC, self.told.append, lambda: self.now)

    def leaves(self) -> Move:
        move = Move("a wire is late", Proposal(OTHER, 2.0, 1.0, 3.0, 90, 0.0), self.moves.layout)
        asking.ask(self.moves, move, self.kept, 0)
        assert not self.moves.decides
        return move

    def rests(self, seconds: float) -> bool:
        """Whether nothing is decided for so long, and no longer."""
        began, self.now = self.now, self.now + seconds - 0.1
        early, self.now = self.moves.decides, began + seconds
        return self.moves.decides and not early

    def meets(self, rung: str = "kept") -> None:
        word = json.dumps({"iteration": 4, "rung": rung, "why": ""})
        (self.kept.root / "resumed.generation-1").write_text(word)
        asking.look(self.moves, self.kept, 1)


def test_the_new_layout_counts_when_all_have_met(tmp_path: Path) -> None:
    run = Run(tmp_path)
    move = run.leaves()
    assert (tmp_path / "leave.generation-0").exists()
    asking.look(run.moves, run.kept, 0)
    assert move.outcome == "asked"
    run.moves.left(1)
    assert (run.moves.layout, run.moves.decides) == (OTHER, False)
    run.meets()
    assert (move.outcome, run.moves.decides) == ("moved", False)
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
    assert (run.moves.layout, move.outcome, run.moves.leaving) == (FIRST, "stayed", False)


def test_ranks_that_cannot_leave_say_why(tmp_path: Path) -> None:
    run = Run(tmp_path)
    move = run.leaves()
    (tmp_path / "stay.generation-0").write_text("rank 1: no memory")
    asking.look(run.moves, run.kept, 0)
    assert (move.outcome, move.why, run.moves.leaving) == ("stayed", "rank 1: no memory", False)
    assert not (tmp_path / "leave.generation-0").exists()
    # Another question gets another answer.
    move = run.leaves()
    asking.look(run.moves, run.kept, 0)
    assert move.outcome == "asked"
    gone = Run(tmp_path / "gone")
    move = Move("", Proposal(OTHER, 2.0, 1.0, 3.0, 90, 0.0), FIRST)
    asking.ask(gone.moves, move, gone.kept, 0)
    assert move.outcome == "stayed"
    assert "cannot be told" in move.why
    assert not gone.moves.leaving


def test_ranks_stay_for_a_while_after_a_change(tmp_path: Path) -> None:
    run = Run(tmp_path)
    move = run.leaves()
    run.moves.left(1)
    run.meets()
    run.now += 1000.0
    assert not run.moves.decides
    run.moves.arrived(4, 2.5)
    assert (move.iteration, move.seconds) == (4, 2.5)
    assert run.rests(25.0)


@pytest.mark.parametrize("how", ["stayed", "went back", "failed at once", "moved, and failed"])
def test_ranks_stay_for_a_while_after_a_change_that_failed(how: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    move = run.leaves()
    if how == "stayed":
        (tmp_path / "stay.generation-0").write_text("rank 1: no memory")
        asking.look(run.moves, run.kept, 0)
    else:
        if how != "failed at once":
            run.moves.left(1)
        if how == "moved, and failed":
            run.meets()
        run.moves.failed(attempt=False)
    assert run.rests(10 * move.proposal.cost)


def test_an_arrival_belongs_to_the_change_before_it(tmp_path: Path) -> None:
    """Generations of another attempt have the same numbers."""
    run = Run(tmp_path)
    move = run.leaves()
    run.moves.left(1)
    run.meets()
    run.moves.failed(attempt=True)
    run.moves.arrived(9, 5.0)
    assert move.iteration is None
    second = Run(tmp_path / "second")
    second.kept.root.mkdir()
    move = second.leaves()
    second.moves.left(1)
    second.meets()
    # The next generation is the first to finish an iteration at the new places.
    second.moves.failed(attempt=False)
    second.moves.arrived(9, 5.0)
    second.moves.arrived(12, 50.0)
    assert (move.iteration, move.seconds) == (9, 5.0)


@pytest.mark.parametrize("rung", ["replica", "checkpoint", "beginning"])
def test_ranks_have_met_only_with_the_state_that_was_left(rung: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    move = run.leaves()
    run.moves.left(1)
    run.meets(rung)
    assert move.outcome == "left"
    assert run.moves.failed(attempt=False)
    assert (run.moves.layout, move.outcome) == (FIRST, "went back")


def test_what_does_not_pay_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = Proposal(OTHER, 2.0, 1.0, 100.0, 90, 0.0)
    monkeypatch.setattr(module, "propose", lambda *_: found)
    run = Run(tmp_path)
    groups = tuple(
        ReductionHealth(stage, 0, "", False, 0.1, 0.1, 0.1, 1, SlowestEdge(0, 0.001, 0.001))
        for stage in range(2)
    )
    network = Network((), (), groups, True, 90)
    assert run.moves.consider(network, 100.0) is None
    assert run.told == []
    late = run.moves._wires.late
    late[0, 3] = 0.029
    # Of a group that has not been measured, nobody knows what a late edge would cost it.
    assert run.moves.consider(replace(network, reductions=()), 100.0) is None
    assert run.moves.consider(replace(network, reductions=groups[:1]), 100.0) is None
    assert run.told == []
    for changed in (0.029, 0.029, 0.025):
        late[0, 3] = changed
        assert run.moves.consider(network, 100.0) is None
    (told,) = run.told
    late[0, 3] = 0.02
    assert run.moves.consider(network, 100.0) is None
    assert len(run.told) == 2
    assert "late: pods 0 and 3; 2 ranks at other places would make" in told
    assert "would save 90.0 s and cost 100.0 s" in told


def test_a_run_that_is_interrupted_while_ranks_move_is_interrupted() -> None:
    """Also where the ladder would start nothing again."""
    ended: list[Ending] = []
    site: Any = SimpleNamespace(
        interrupts=SimpleNamespace(received=signal.SIGTERM),
        ladder=Ladder(1, counted=1, best=9),
        hangs=SimpleNamespace(finished=5),
        moves=SimpleNamespace(settling=False),
        kept=None,
        run=SimpleNamespace(
            attempts=[SimpleNamespace(end=lambda ending, at: ended.append(ending))]
        ),
    )
    moved = Ending(End.MOVED, "the ranks leave for other places", retry=True)
    found = _Host.agree(site, Life(0, 1), moved)
    assert ended == [found] and isinstance(found, Ending)
    assert EXIT[found.end] == 130
    assert found.details == ()
    assert found.reason == "SIGTERM, while the ranks changed places"
