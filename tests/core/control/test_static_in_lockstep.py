"""Static dispatch where ranks share collectives in ops: along dp_shard, cp and tp."""

from __future__ import annotations

import pytest
from plant_support import Plant, spec
from pydantic import ValidationError

from pipemorph.planning import Dispatch

DIMENSIONS = ("shard", "context", "tensor")


@pytest.mark.parametrize("dimension", ["replicas", *DIMENSIONS])
def test_no_plan_is_guided_where_ops_hold_collectives(dimension: str) -> None:
    """Neither the first plan nor those for a slow link are guided."""
    job = spec(parallelism={"stages": 4, dimension: 2}, schedule={"dispatch": "auto"})
    plant = Plant(job)
    dispatches = {plant.plan.dispatch}
    plant.run(12)
    plant.delays[1] = 0.06
    for _ in range(20):
        plant.run(1)
        dispatches.add(plant.plan.dispatch)
    assert plant.plan.version > 0
    if dimension == "replicas":
        assert Dispatch.GUIDED in dispatches
    else:
        assert dispatches == {Dispatch.STATIC}


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_guided_dispatch_is_refused_there(dimension: str) -> None:
    with pytest.raises(ValidationError, match="need one order of ops: use dispatch static"):
        spec(parallelism={"stages": 4, dimension: 2}, schedule={"dispatch": "guided"})
