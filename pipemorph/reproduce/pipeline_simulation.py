"""Iterations of the paper's models, simulated for each way to run them. Milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from pipemorph.planning import (
    Link,
    Policy,
    Problem,
    Route,
    Schedule,
    StageTimes,
    build_link,
    plan,
    simulate,
)
from pipemorph.reproduce.published import Model, load_model


class SimulatedWay(NamedTuple):
    """Way to run a job. ``route``: of slow links. ``half_duplex``: a pair of ranks has one queue,
    as a communicator of torch.distributed. ``adapted``: the plan is made for the delays."""

    policy: Policy
    route: Route = Route.DIRECT
    half_duplex: bool = False
    adapted: bool = False


SIMULATED_WAYS = {
    "1f1b": SimulatedWay(Policy.ONE_F_ONE_B),
    "zero-bubble": SimulatedWay(Policy.ZERO_BUBBLE, half_duplex=True),
    "delegated": SimulatedWay(Policy.ZERO_BUBBLE, Route.DELEGATED),
    "adapted": SimulatedWay(Policy.PIPEMORPH, Route.DELEGATED, adapted=True),
}

Delays = Mapping[int, float]
"""Milliseconds of delay by link."""


def build_healthy_problem(model: Model) -> Problem:
    """Problem of a model whose messages take no time."""
    ops = zip(model.forward, model.backward_input, model.backward_weight, strict=True)
    return Problem(
        microbatches=model.microbatches,
        stages=tuple(
            StageTimes(forward=forward, backward_input=backward, backward_weight=weight)
            for forward, backward, weight in ops
        ),
        links=(Link(),) * (model.stages - 1),
    )


def build_slow_problem(
    model: Model, way: SimulatedWay, delays: Delays, copying: float = 0.0
) -> Problem:
    """Problem with slow links. ``copying``: time that each F and B next to a slow link takes
    longer, for the copies of its message."""
    healthy = build_healthy_problem(model)
    ends = {stage for link in delays for stage in (link, link + 1)}
    stages = [
        stage.model_copy(
            update={
                "forward": stage.forward + copying,
                "backward_input": stage.backward_input + copying,
            }
        )
        if copying and i in ends
        else stage
        for i, stage in enumerate(healthy.stages)
    ]
    links = [
        build_link(
            way.route if link in delays else Route.DIRECT,
            delays.get(link, 0.0),
            half_duplex=way.half_duplex,
        )
        for link in range(model.stages - 1)
    ]
    return healthy.model_copy(update={"stages": tuple(stages), "links": tuple(links)})


def simulate_way(model: Model, way: str, delays: Delays, copying: float = 0.0) -> float:
    """Milliseconds of an iteration, with the time outside its ops."""
    real = build_slow_problem(model, SIMULATED_WAYS[way], delays, copying)
    schedule = choose_schedule(model, way, real)
    return simulate(schedule, real).makespan + measure_outside(model)


def choose_schedule(model: Model, way: str, real: Problem) -> Schedule:
    """Schedule of a way: planned for ``real``, or without knowing of it."""
    found = SIMULATED_WAYS[way]
    return plan(real if found.adapted else build_healthy_problem(model), found.policy).schedule


def measure_outside(model: Model) -> float:
    """Milliseconds of an iteration outside its ops, the only fitted constant: the published time of
    undisturbed zero-bubble, less the simulated one."""
    return model.undisturbed["zero-bubble"] - _simulate_undisturbed(model.name)


@cache
def _simulate_undisturbed(name: str) -> float:
    return plan(build_healthy_problem(load_model(name)), Policy.ZERO_BUBBLE).makespan
