"""Batches that vary in work: with costs they are no slow stages, and no failed plans."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from plant_support import Plant, spec

from pipemorph.control.history.job_history import JobHistory
from pipemorph.planning import StageTimes
from pipemorph.protocol import IterationSample, StageProfile

VARIATION = 0.4
UNIT = 3000.0
"""Cost of a microbatch of the usual work, such as its tokens."""


class VaryingPlant(Plant):
    """Trainer whose batches differ in work: lognormal, mean 1. ``costs``: its script gives them."""

    def __init__(self, *, costs: bool, slow_from: int = 1000) -> None:
        super().__init__(spec())
        self.costs, self.slow_from, self.work = costs, slow_from, 1.0

    def step(self) -> None:
        variance = math.log(1 + VARIATION**2)
        drawn = random.Random(self.iteration)
        self.work = drawn.lognormvariate(-variance / 2, math.sqrt(variance))
        for stage in range(self.stages):
            slowed = stage == 1 and self.iteration >= self.slow_from
            one = 0.01 * self.work * (1.6 if slowed else 1.0)
            self.ops[stage] = StageTimes(forward=one, backward_input=one, backward_weight=one)
        super().step()

    @property
    def cost(self) -> float | None:
        return UNIT * self.work if self.costs else None

    def profile(self, stage: int, op: StageTimes) -> StageProfile:
        return super().profile(stage, op).model_copy(update={"cost": self.cost})

    def send(self, **fields: Any) -> None:
        samples = fields.get("iterations", ())
        if samples:
            fields["iterations"] = [s.model_copy(update={"cost": self.cost}) for s in samples]
        super().send(**fields)


def test_a_varying_batch_is_no_slowing_stage() -> None:
    plant = VaryingPlant(costs=True)
    plant.run(80)
    assert [record.reason for record in plant.controller.records] == []
    assert plant.controller.get_job_view(plant.now).stragglers.count == 0


def test_a_slowing_stage_is_found_in_a_varying_batch() -> None:
    """The medians without costs are too noisy for that."""
    found = {}
    for costs in (True, False):
        plant = VaryingPlant(costs=costs, slow_from=40)
        plant.run(80)
        found[costs] = plant.controller.records, plant.controller.get_job_view(plant.now).stragglers
    records, stragglers = found[True]
    assert [record.reason[:8] for record in records] == ["op times"]
    (slow,) = stragglers.slowest
    assert (slow.stage, slow.column) == (1, None)
    assert slow.ratio == pytest.approx(1.6, rel=0.05)
    assert not found[False][0]


@pytest.mark.parametrize("costs", [True, False])
def test_iterations_are_compared_at_one_cost(costs: bool) -> None:
    """A batch of twice the work takes twice as long under the same plan."""
    history, works = JobHistory(), [1.0, 2.0, 0.5, 1.5, 1.0, 0.8, 3.0]
    for index, work in enumerate(works):
        sample = IterationSample(
            index=index, seconds=0.2 * work, loss=None, plan_version=0, bubble_fraction=0.1,
            cost=UNIT * work if costs else None,
        )  # fmt: skip
        history.add_iterations([sample], list)
    found = [each.comparable_seconds for each in history.list_iterations()]
    seconds = [each.seconds for each in history.list_iterations()]
    assert seconds == pytest.approx([0.2 * work for work in works])
    if not costs:
        assert found == seconds
    else:
        assert found == pytest.approx([0.2, 0.3, 0.2, 0.25, 0.2, 0.2, 0.2]), "of the median so far"
