"""Python's garbage collector: measured, moved between iterations, restored, and the script's."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from launch import run_ranks
from set_clock import Clock
from split_support import Lambda
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipemorph.errors import InputError
from pipemorph_trainer import Options, Pipeline, TrainerContext
from pipemorph_trainer.executor import collector_pauses
from pipemorph_trainer.executor.collector_pauses import (
    FULL_BOUNDARIES,
    LEAST_ITERATIONS,
    CollectorPauses,
    PauseTimes,
)
from pipemorph_trainer.settings import Settings


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Collector of this process as in a new one; generations that are collected on request."""
    collected: list[int] = []
    collecting = gc.collect

    def collect(generation: int = 2) -> int:
        collected.append(generation)
        return collecting(generation)

    monkeypatch.setattr(gc, "collect", collect)
    monkeypatch.setattr(collector_pauses, "_inherited_frozen", gc.get_freeze_count())
    before = gc.isenabled(), gc.get_threshold()
    gc.enable()
    gc.set_threshold(700, 10, 10)
    yield collected
    gc.set_threshold(*before[1])
    (gc.enable if before[0] else gc.disable)()


def pass_iterations(pauses: CollectorPauses, clock: Clock, count: int, paused: float) -> None:
    """Pass iterations of a second, with a pause of ``paused`` seconds in each."""
    for _ in range(count):
        pauses.begin_iteration()
        clock.now += 1 - paused
        pauses._measure_pause("start", {})
        clock.now += paused
        pauses._measure_pause("stop", {})
        pauses.pass_boundary(requested=pauses.exceeds_limit)
        pauses.end_iteration()


@pytest.mark.parametrize(("paused", "moves"), [(0.004, False), (0.006, True)])
def test_the_collector_moves_if_pauses_exceed_half_a_percent(
    collector: list[int], paused: float, moves: bool
) -> None:
    clock = Clock()
    pauses = CollectorPauses("auto", "rank 0", clock=clock)
    pass_iterations(pauses, clock, LEAST_ITERATIONS, paused)
    assert not pauses.exceeds_limit, "the first iteration does not count"
    pass_iterations(pauses, clock, 2, paused)
    assert gc.isenabled() and gc.get_threshold() == (0 if moves else 700, 10, 10)
    assert collector == ([2, 1] if moves else [])
    pauses.close()
    pauses.close()
    assert gc.isenabled() and gc.get_threshold() == (700, 10, 10)
    assert gc.get_freeze_count() == collector_pauses._inherited_frozen
    assert not [each for each in gc.callbacks if "CollectorPauses" in str(each)]


def test_boundaries_collect_what_is_new_and_sometimes_everything(collector: list[int]) -> None:
    clock = Clock()
    pauses = CollectorPauses("auto", "rank 0", clock=clock)
    pass_iterations(pauses, clock, LEAST_ITERATIONS + 2, 0.01)
    frozen = gc.get_freeze_count()
    assert frozen > 1000
    collector.clear()
    pass_iterations(pauses, clock, FULL_BOUNDARIES, 0.0)
    assert collector.count(2) == 1 and collector.count(1) == FULL_BOUNDARIES - 1
    assert gc.get_freeze_count() <= frozen
    pauses.close()


def test_pauses_at_a_boundary_are_apart_from_those_inside(collector: list[int]) -> None:
    clock = Clock()
    pauses = CollectorPauses("auto", "rank 0", clock=clock)
    pass_iterations(pauses, clock, LEAST_ITERATIONS + 2, 0.01)
    pauses.begin_iteration()
    clock.now += 0.25
    at = iter((10.0, 10.5))
    pauses._clock = lambda: next(at, 11.0)
    pauses.pass_boundary(requested=True)
    found = pauses.end_iteration()
    assert found.inside == 0 and found.between >= 0.5
    pauses.close()


def freeze_objects() -> None:
    gc.freeze()


@pytest.mark.parametrize(
    ("handle", "undo"),
    [
        (gc.disable, gc.enable),
        (lambda: gc.set_threshold(50_000, 20, 20), lambda: gc.set_threshold(700, 10, 10)),
        (freeze_objects, gc.unfreeze),
    ],
    ids=["disabled", "thresholds", "frozen"],
)
def test_a_scripts_own_handling_wins(
    collector: list[int], handle: Callable[[], None], undo: Callable[[], None]
) -> None:
    clock = Clock()
    pauses = CollectorPauses("auto", "rank 0", clock=clock)
    try:
        handle()
        seen = gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0
        pass_iterations(pauses, clock, LEAST_ITERATIONS + 3, 0.1)
        assert not collector
        pauses.close()
        assert (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0) == seen
    finally:
        undo()


def test_a_script_that_sets_thresholds_again_has_it_back(collector: list[int]) -> None:
    clock = Clock()
    pauses = CollectorPauses("auto", "rank 0", clock=clock)
    pass_iterations(pauses, clock, LEAST_ITERATIONS + 2, 0.1)
    gc.set_threshold(800, 10, 10)
    collector.clear()
    pass_iterations(pauses, clock, LEAST_ITERATIONS + 3, 0.1)
    assert gc.get_threshold() == (800, 10, 10) and not collector
    pauses.close()
    assert gc.get_threshold() == (800, 10, 10) and gc.get_freeze_count() == 0


def set_other_thresholds() -> None:
    gc.set_threshold(900, 10, 10)


@pytest.mark.parametrize("handle", [gc.disable, set_other_thresholds])
def test_what_a_script_sets_while_it_is_moved_stays_at_the_end(
    collector: list[int], handle: Callable[[], None]
) -> None:
    clock = Clock()
    pauses = CollectorPauses("auto", "rank 0", clock=clock)
    pass_iterations(pauses, clock, LEAST_ITERATIONS + 2, 0.1)
    assert gc.get_threshold() == (0, 10, 10)
    handle()
    pauses.close()
    disabled = handle is gc.disable
    assert (gc.isenabled(), gc.get_threshold()[0]) == (not disabled, 700 if disabled else 900)


def test_objects_that_a_parent_froze_stay_frozen(
    collector: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.freeze()
    try:
        monkeypatch.setattr(collector_pauses, "_inherited_frozen", gc.get_freeze_count())
        clock = Clock()
        pauses = CollectorPauses("auto", "rank 0", clock=clock)
        pass_iterations(pauses, clock, LEAST_ITERATIONS + 2, 0.1)
        assert gc.get_threshold() == (0, 10, 10)
        pauses.close()
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()


def test_a_pipeline_that_never_begins_leaves_nothing(collector: list[int]) -> None:
    CollectorPauses("auto", "rank 0")
    assert not [each for each in gc.callbacks if "CollectorPauses" in str(each)]


def test_off_only_measures(collector: list[int]) -> None:
    clock = Clock()
    pauses = CollectorPauses("off", "rank 0", clock=clock)
    pass_iterations(pauses, clock, LEAST_ITERATIONS + 3, 0.1)
    pauses.begin_iteration()
    pauses._measure_pause("start", {})
    clock.now += 0.125
    pauses._measure_pause("stop", {})
    assert not collector and pauses.end_iteration() == PauseTimes(0.125, 0.0)
    pauses.close()


class Cycle:
    """Object that only the collector frees."""

    def __init__(self) -> None:
        self.own = self


def train_with_garbage(
    context: TrainerContext, choice: Literal["auto", "off"]
) -> tuple[list[bool], list[PauseTimes], tuple[bool, bool]]:
    """Train two stages, of which the first makes garbage. Returns for each iteration whether the
    collector ran in it, and its pauses; and whether it is as it was at the end."""
    collector_pauses.MOST_SHARE = 1e-9
    gc.set_threshold(700, 10, 10)
    frozen = gc.get_freeze_count()

    def forward(m: Any, x: Tensor) -> Tensor:
        if context.rank == 0:
            _ = [Cycle() for _ in range(3000)]
        return x * m.weight

    module = Lambda(forward, weight=nn.Parameter(torch.ones(())))
    enabled, found = [], []
    with Pipeline(
        module, context=context, loss_fn=mse_loss, microbatches=2, options=Options(gc=choice)
    ) as pipe:
        ending = pipe._collector.end_iteration
        pipe._collector.end_iteration = lambda: found.append(each := ending()) or each  # type: ignore[method-assign, func-returns-value]
        for _ in range(LEAST_ITERATIONS + 6):
            pipe.step(torch.ones(2, 3), target=torch.zeros(2, 3))
            enabled.append(gc.get_threshold()[0] > 0)
            if len(enabled) == 2:
                pipe.evaluate(torch.ones(2, 3), target=torch.zeros(2, 3))
    as_before = gc.get_threshold() == (700, 10, 10), gc.get_freeze_count() == frozen
    return enabled, found, as_before


def test_all_ranks_collect_between_the_same_iterations() -> None:
    """Only the first stage has garbage, and both ranks move their collector."""
    ranks = run_ranks(2, train_with_garbage, "auto")
    (enabled, first, _), (same, second, _) = ranks
    assert enabled == same and True in enabled and False in enabled
    moved = enabled.index(False)
    assert moved < len(enabled) - 2 and not any(enabled[moved:])
    assert any(each.inside for each in first[:moved]), "nothing had to be moved"
    for pauses in (first, second):
        assert all(each.inside == 0 for each in pauses[moved:])
        # No step follows the last one.
        assert all(each.between > 0 for each in pauses[moved - 1 : -1])
    assert [end for _, _, end in ranks] == [(True, True)] * 2


def test_an_unknown_choice_is_refused() -> None:
    options = Options(gc="never")  # type: ignore[arg-type]
    context = TrainerContext(0, 1, 0, "localhost", 1)
    with pytest.raises(InputError, match="gc is 'never'; expected auto or off"):
        Settings.from_arguments(context, options.to_settings())
