"""The benchmark of the drain: what it says cannot be hidden, and that nothing more is exposed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import pytest
from launch import run_ranks

from pipemorph_trainer import TrainerContext
from pipemorph_trainer.executor.stages.emulated import GRADIENT_PARTS

pytestmark = pytest.mark.full
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load() -> ModuleType:
    # It imports its neighbour.
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("bench_drain", BENCHMARKS / "drain.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


@pytest.fixture(scope="module")
def drain() -> ModuleType:
    return load()


def rank(context: TrainerContext, *case: Any) -> list[float]:
    module = load()
    found: list[float] = module.exposed(context, module.Case(*case)).exposed
    return found


def test_what_is_left_of_a_reduction(drain: ModuleType) -> None:
    # The first of 8 buckets is there after an eighth of the op; then one follows the other.
    assert drain.left(0.24, 0.04, 8) == pytest.approx(0.24 - 0.04 * 7 / 8)
    # As fast as they are written: the last one is left.
    assert drain.left(0.02, 0.04, 8) == pytest.approx(0.02 / 8)
    assert drain.left(0.1, 0.0, 1) == pytest.approx(0.1)


def test_the_stage_that_ends_last_hides_nothing_but_in_its_last_op(drain: ModuleType) -> None:
    schedule = drain.schedule_of("1f1b")
    assert drain.drain_of(schedule) == pytest.approx(0.12)
    assert drain.cannot_be_hidden(schedule, 0.24, 8) == pytest.approx(drain.left(0.24, 0.04, 8))
    # What follows the last op, as with FSDP, does not even hide there.
    assert drain.cannot_be_hidden(schedule, 0.24, 0) == pytest.approx(0.24)


def test_no_more_is_exposed(drain: ModuleType) -> None:
    """Two stages, reductions two drains long: after the drain, all of it would be exposed."""
    schedule = drain.schedule_of("1f1b", 2)
    reduction = 2 * drain.drain_of(schedule)
    least = drain.cannot_be_hidden(schedule, reduction, GRADIENT_PARTS)
    assert least < 0.6 * reduction
    for late in (False, True):
        found = median(run_ranks(4, rank, "1f1b", 2.0, late, 4, 2)[0])
        if late:
            assert found >= reduction, "all of it"
        else:
            # A millisecond of the collectives themselves, which take no time in the simulator.
            assert found <= 1.1 * least + 0.001, (found, least)
