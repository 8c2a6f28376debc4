"""When ranks are asked to leave for other parts, and which split of the layers counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipemorph.api.layout import Layout
from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.ladder import Ladder
from pipemorph.control.decide.layouts.beside import Beside
from pipemorph.control.decide.layouts.moves import (
    CONFIRM_ITERATIONS,
    CONFIRM_SECONDS,
    Move,
    Moves,
)
from pipemorph.control.decide.layouts.relayout import Network
from pipemorph.control.observed.stages import StageTable
from pipemorph.exits import PARTS_STAY
from pipemorph.local import host as host_module
from pipemorph.local import moves as asking
from pipemorph.local.generations import Life
from pipemorph.local.host import _Host
from pipemorph.local.processes.kept import KeptFolder
from pipemorph.local.processes.supervise import End, Ending
from pipemorph.planning import StageTimes
from pipemorph.wire import StageState

SPEC = JobSpec.model_validate(
    {
        "parallelism": {"stages": 4, "layers": 16},
        "schedule": {"microbatches": 12},
        "trainer": {"module": "m", "iterations": 9},
        "failurePolicy": {"maxRestarts": 1},
        "adaptation": {"relayout": True},
    }
)
FIRST = Layout.of(SPEC.parallelism)
COST = 2.0


def network(*factors: float, left: int) -> Network:
    times = (
        StageTimes(forward=f / 100, backward_input=f / 100, backward_weight=f / 100)
        for f in factors
    )
    return Network(tuple(times), (), (), True, left, Beside(16, (0.03,) * 4))


class Run:
    """The host of a run, by the second and iteration."""

    def __init__(self, folder: Path) -> None:
        self.told: list[str] = []
        self.kept = KeptFolder(folder)
        self.now, self.left = 1000.0, 500
        self.moves = Moves(SPEC, self.told.append, lambda: self.now)

    def looks(self, *factors: float, times: int = 1) -> Move | None:
        """Look so many times, a second and two iterations apart, until a change pays."""
        for _ in range(times):
            self.now, self.left = self.now + 1.0, self.left - 2
            found = self.moves.consider(network(*factors, left=self.left), COST)
            if found is not None:
                return found
        return None

    def moves_layers(self) -> Move:
        self.looks(1, 1, 1, 1)
        move = self.looks(1, 1.5, 1, 1, times=5)
        assert move is not None
        asking.ask(self.moves, move, self.kept, 0)
        return move


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_slow_stage_has_to_stay_slow(run: Run) -> None:
    assert run.looks(1, 1, 1, 1, times=5) is None
    for _ in range(3):
        # Slow for a moment.
        assert run.looks(1, 1.5, 1, 1, times=round(CONFIRM_SECONDS)) is None
        assert run.looks(1, 1, 1, 1) is None
    assert run.told == []
    move = run.looks(1, 1.5, 1, 1, times=max(round(CONFIRM_SECONDS), CONFIRM_ITERATIONS // 2) + 1)
    assert move is not None and move.of_layers
    assert move.proposal.layout.layers == (5, 3, 4, 4)
    assert move.reason.startswith(
        "stage 1 computes for 45.0 ms of a microbatch, the others for 30.0 ms; with 5, 3, 4, 4"
        " layers an iteration would take"
    )


def test_noise_is_no_reason_to_move(run: Run) -> None:
    """One stage after another seems slow, or one by very different times."""
    run.looks(1, 1, 1, 1)
    for _ in range(6):
        assert run.looks(1, 1.5, 1, 1, times=2) is None
        assert run.looks(1, 1, 1.5, 1, times=2) is None
    for _ in range(6):
        assert run.looks(1, 1.4, 1, 1) is None
        assert run.looks(1, 2.6, 1, 1) is None


def test_looks_between_two_iterations_do_not_count(run: Run) -> None:
    run.looks(1, 1, 1, 1)
    for slower in (1.4, 2.6, 1.4):
        assert run.looks(1, slower, 1, 1) is None
    for _ in range(9):
        run.now += 1.0
        assert run.moves.consider(network(1, 1.5, 1, 1, left=run.left), COST) is None
    assert run.looks(1, 1.5, 1, 1, times=3) is not None


def test_what_was_seen_before_a_pause_does_not_count(run: Run) -> None:
    run.looks(1, 1, 1, 1)
    assert run.looks(1, 1.5, 1, 1, times=2) is None
    run.now += 1000.0
    assert run.looks(1, 1.5, 1, 1, times=2) is None
    assert run.looks(1, 1.5, 1, 1, times=2) is not None


def test_a_failure_to_look_for_another_layout_is_told_once(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module.time, "monotonic", lambda: run.now)

    class Site:
        moves, kept, considered, failed_looks = run.moves, run.kept, 0.0, set[str]()
        hangs = type("", (), {"longest_start": 2.0})
        service = type("", (), {"network": staticmethod(lambda: None)})
        progress = type("", (), {"note": staticmethod(run.told.append)})

    site: Any = Site()
    for _ in range(2):
        run.now += 5.0
        site.service.network = lambda: "not a network"
        _Host._consider_layouts(site)
    (told,) = run.told
    assert told.startswith("no other layout can be looked for: AttributeError(")


def test_what_does_not_pay_is_said_once(run: Run) -> None:
    run.left = 20
    run.looks(1, 1, 1, 1)
    assert run.looks(1, 1.5, 1, 1, times=8) is None
    (told,) = run.told
    assert told.startswith("layers stay where they are: stage 1 computes for 45.0 ms")
    assert "and cost 2.0 s" in told


def test_the_new_split_counts_when_all_have_met(run: Run, tmp_path: Path) -> None:
    move = run.moves_layers()
    assert json.loads((tmp_path / "leave.generation-0").read_text()) == [5, 3, 4, 4]
    assert not run.moves.settling
    assert run.moves.left(1) is move
    assert run.moves.settling and run.moves.layout.layers == (5, 3, 4, 4)
    word = json.dumps({"iteration": 4, "rung": "kept", "why": ""})
    (tmp_path / "resumed.generation-1").write_text(word)
    asking.look(run.moves, run.kept, 1)
    assert (move.outcome, run.moves.settling) == ("moved", False)
    assert not run.moves.failed(attempt=False)
    assert run.moves.layout.layers == (5, 3, 4, 4)
    assert run.moves.failed(attempt=True)
    assert run.moves.layout == FIRST


def test_a_split_with_which_ranks_failed_is_not_tried_again(run: Run) -> None:
    move = run.moves_layers()
    run.moves.left(1)
    assert run.moves.failed(attempt=False)
    assert (run.moves.layout, move.outcome) == (FIRST, "went back")
    run.now += 1000.0
    # What layers take has changed, so that it is decided again.
    again = run.looks(1, 1.66, 1, 1, times=5)
    assert again is None or again.proposal.layout.layers != move.proposal.layout.layers


def test_parts_that_cannot_change_are_asked_once(run: Run, tmp_path: Path) -> None:
    move = run.moves_layers()
    (tmp_path / "stay.generation-0").write_text(f"{PARTS_STAY}no builder")
    asking.look(run.moves, run.kept, 0)
    assert (move.outcome, run.moves.leaving) == ("stayed", False)
    assert (
        run.told[-1]
        == "layers stay where they are: the parts of the model cannot change: no builder"
    )
    run.now += 1000.0
    assert run.looks(1, 3, 1, 1, times=8) is None


def test_parts_that_cannot_be_composed_are_not_tried_with_another_split(
    run: Run, tmp_path: Path
) -> None:
    move = run.moves_layers()
    run.moves.left(1)
    why = f"{PARTS_STAY}the optimizer's group 1 has parameters of groups that differed"
    (tmp_path / "stay.generation-1").write_text(why)
    for _ in range(2):
        asking.look(run.moves, run.kept, 1)
    assert run.moves.failed(attempt=False)
    assert (run.moves.layout, move.outcome, move.why) == (FIRST, "went back", why)
    assert run.told.count(why) == 1
    run.now += 1000.0
    assert run.looks(1, 3, 1, 1, times=8) is None


def test_invalid_input_in_a_new_split_goes_back(run: Run) -> None:
    """Ranks end with 2 for what a restart does not change; the split before is no restart."""
    run.moves_layers()
    run.moves.left(1)
    went_on: list[Any] = []

    class Site:
        interrupts = type("", (), {"received": None})
        ladder = Ladder(1)
        hangs = type("", (), {"finished": 5})
        moves, kept = run.moves, None
        _go_on = staticmethod(lambda *args: went_on.append(args))

    invalid = Ending(End.FAILED, "rank 0 exited with code 2", status=2, retry=False)
    site: Any = Site()
    assert _Host.agree(site, Life(0, 1), invalid) == Life(0, 2)
    assert went_on


def test_stages_are_expected_to_take_what_their_layers_take() -> None:
    table = StageTable(SPEC)
    for stage in range(4):
        table.take(
            StageState(
                stage=stage, forward=0.01, backward_input=0.01, backward_weight=0.01,
                fused_backward=None, activation_bytes=1000, offload_copy=None, peak_memory=0,
            )
        )  # fmt: skip
    table.scale((1.25, 0.75, 1.0, 1.0))
    times = table.times()
    assert times is not None
    assert [each.forward for each in times] == [0.0125, 0.0075, 0.01, 0.01]
    assert [each.activation_bytes for each in times] == [1250, 750, 1000, 1000]
