"""Spread of the microbatches' work, from op times with noise."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from pipemorph.planning.ir import OpKind
from pipemorph_trainer.executor.device_times import MeasuredCopy, MeasuredOp
from pipemorph_trainer.executor.microbatch_costs import MicrobatchWork
from pipemorph_trainer.executor.stage_executor import StageRecord
from pipemorph_trainer.executor.work_spread import WorkVariance, measure_work

N = 16


def run_ops(
    work: list[float], rng: random.Random, noise: float, *, fused: bool = False
) -> list[MeasuredOp]:
    """Ops of an iteration whose times have independent errors of at most ``noise``."""
    ops, at = [], 3.0
    parts = [(OpKind.F, 0.01), *([(OpKind.BW, 0.02)] if fused else [])]
    parts += [] if fused else [(OpKind.B, 0.01), (OpKind.W, 0.01)]
    for kind, seconds in parts:
        for k, each in enumerate(work):
            end = at + seconds * each * rng.uniform(1 - noise, 1 + noise)
            ops.append(MeasuredOp(kind, k, at, end))
            at = end
    return ops


@pytest.mark.parametrize("fused", [True, False])
def test_differences_in_work_are_found_and_noise_is_not(fused: bool) -> None:
    rng = random.Random(1)
    found: dict[str, list[float]] = {"equal": [], "different": [], "priced": []}
    for _ in range(60):
        work = [rng.choice([0.6, 1.4]) for _ in range(N)]
        equal = measure_work(run_ops([1.0] * N, rng, 0.3, fused=fused))
        different = measure_work(run_ops(work, rng, 0.3, fused=fused))
        priced = measure_work(run_ops(work, rng, 0.3, fused=fused), [5 * each for each in work])
        assert equal is not None and different is not None and priced is not None
        assert different.unexplained == different.whole
        found["equal"].append(equal.whole)
        found["different"].append(different.whole)
        found["priced"].append(priced.unexplained)
        assert priced.whole > 0.05
    assert fmean(found["equal"]) == pytest.approx(0, abs=0.005)
    assert fmean(found["different"]) == pytest.approx(0.16, rel=0.15), "0.4 squared"
    assert fmean(found["priced"]) == pytest.approx(0, abs=0.005)


def test_the_error_of_mean_op_times() -> None:
    assert WorkVariance(0.3, 0.16).compute_error(16) == pytest.approx(0.1)
    assert WorkVariance(0.3, -0.01).compute_error(16) == 0, "negative by chance"


def test_copies_are_no_work_and_ops_may_be_too_few() -> None:
    ops = run_ops([1.0, 2.0, 1.0, 2.0], random.Random(0), 0.0)
    slowed = [op._replace(end=op.end + 9.0 * (op.microbatch == 0)) for op in ops]
    copies = [
        MeasuredCopy(op.kind, 0, op.end - 9.0, op.end, 1) for op in slowed if not op.microbatch
    ]
    record = StageRecord(slowed, copies, work=MicrobatchWork((1.0, 2.0, 1.0, 2.0)))
    found = record.measure_work()
    assert found is not None
    assert found == pytest.approx((1 / 9 * 4 / 3, 0), abs=1e-9)
    assert measure_work(ops[:4]) is None, "only forwards"
    assert measure_work([op for op in ops if op.microbatch == 0]) is None
    assert measure_work([op._replace(end=op.start) for op in ops]) is None
