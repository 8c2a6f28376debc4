"""Guided and online dispatch, and a given warm-up, with several stages per rank."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pipemorph.errors import InputError
from pipemorph.planning import Dispatch, Link, Policy, Problem, StageTimes
from pipemorph.planning.interleaved import plan_interleaved
from pipemorph.planning.simulation import core
from pipemorph.planning.simulation.costs import DelayAt
from pipemorph.planning.simulation.interleaved import (
    InterleavedSimulation,
    simulate_interleaved,
    validate_interleaved,
)


def drawn(rng: random.Random) -> Problem:
    ranks, microbatches = rng.randint(1, 3), rng.randint(1, 8)
    count = ranks * rng.randint(1, 3)

    def stage() -> StageTimes:
        limits: dict[str, Any] = rng.choice(
            ({}, {"device_limit": rng.randint(1, 3), "offload_copy": 1}, {"in_flight_limit": 4})
        )
        times = {kind: rng.randrange(9) / 2 for kind in ("forward", "backward_input")}
        return StageTimes(**times, backward_weight=rng.randrange(9) / 2, **limits)

    def link() -> Link:
        bounds = {name: rng.choice((None, 1, 2)) for name in ("queues", "outstanding")}
        return Link(delay=rng.choice((0, 3, 20)), **bounds)

    return Problem(
        microbatches=microbatches,
        stages=tuple(stage() for _ in range(count)),
        links=tuple(link() for _ in range(count - 1)),
        ranks=ranks,
        placement=rng.choice(("interleaved", "v")),
    )


def late(rng: random.Random, most: float) -> DelayAt:
    """Delays of messages that have nothing to do with each other."""
    seed = rng.random()
    return lambda link, sent: random.Random(f"{seed} {link} {sent!r}").uniform(0, most)


@pytest.mark.parametrize("dispatch", [Dispatch.GUIDED, Dispatch.ONLINE])
def test_whatever_comes_late(dispatch: Dispatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled and in Python, to the bit: no rank waits for ever or exceeds a limit."""
    rng = random.Random(3)
    differ = 0
    for _ in range(60):
        planned = plan_interleaved(drawn(rng))
        order, problem, delay_at = planned.schedule, planned.problem, late(rng, 30)

        def run() -> InterleavedSimulation:
            return simulate_interleaved(order, problem, dispatch, delay_at=delay_at)  # noqa: B023

        ran = run()
        with monkeypatch.context() as without:
            without.setattr(core, "compiled", None)
            plain = run()
        assert ran == plain
        assert ran.simulation.free == plain.simulation.free
        peaks = order.per_stage().in_flight_peak()
        limits = peaks if dispatch is Dispatch.GUIDED else problem.in_flight_limits()
        validate_interleaved(ran.schedule, limits, problem.device_limits())
        differ += ran.schedule != order
    assert differ > 20


def test_guided_is_the_plan_while_nothing_is_late() -> None:
    rng = random.Random(4)
    for _ in range(60):
        planned = plan_interleaved(drawn(rng))
        guided = simulate_interleaved(planned.schedule, planned.problem, Dispatch.GUIDED)
        assert guided == planned.simulation
        assert guided.simulation.free == planned.simulation.simulation.free


@pytest.mark.parametrize(("placement", "most"), [("interleaved", 1.0), ("v", 1.01)])
def test_what_it_brings_while_messages_are_late(placement: Any, most: float) -> None:
    """Messages up to 2 forwards late, planned for none: mean of 20 draws. No gain in a V."""
    ten = StageTimes(forward=10, backward_input=10, backward_weight=10)
    given = Problem(
        microbatches=16, stages=(ten,) * 8, links=(Link(),) * 7, ranks=4, placement=placement
    )
    order, rng = plan_interleaved(given).schedule, random.Random(5)
    took = dict.fromkeys(Dispatch, 0.0)
    for _ in range(20):
        delay_at = late(rng, 20)
        for mode in Dispatch:
            took[mode] += simulate_interleaved(order, given, mode, delay_at=delay_at).makespan / 20
    assert took[Dispatch.GUIDED] < most * took[Dispatch.STATIC], took


def test_a_given_warmup_is_that_of_each_stage() -> None:
    ten = StageTimes(forward=10, backward_input=10, backward_weight=10, in_flight_limit=6)
    given = Problem(microbatches=8, stages=(ten,) * 4, links=(Link(),) * 3, ranks=2)
    for warmup in ((6, 4, 3, 1), (4, 4, 2, 2), (1, 1, 1, 1)):
        order = plan_interleaved(given.with_warmup(warmup)).schedule
        assert order.per_stage().warmup() == warmup
        validate_interleaved(order, given.in_flight_limits())
    with pytest.raises(InputError, match="sets its own"):
        plan_interleaved(given.with_warmup((4, 3, 2, 1)), Policy.ONE_F_ONE_B_INTERLEAVED)
