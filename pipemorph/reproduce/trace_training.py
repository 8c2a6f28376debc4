"""Training of the paper's models through traces of link delays: with a fixed schedule, and with the
control loop. Simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from pipemorph.planning import simulate
from pipemorph.replay.baselines import ReplayResult, replay_trace
from pipemorph.replay.link_trace import LinkTrace, TracedLink
from pipemorph.reproduce.pipeline_simulation import (
    SIMULATED_WAYS,
    build_healthy_problem,
    build_slow_problem,
    choose_schedule,
    measure_outside,
)
from pipemorph.reproduce.published import Model, Spread

HEALTHY = TracedLink()


def build_trace(states: Mapping[float, Mapping[int, float]], *, by_seconds: bool) -> LinkTrace:
    """Trace of delays: from each iteration or second on, milliseconds by link."""
    return LinkTrace(
        "seconds" if by_seconds else "iterations",
        tuple(map(float, states)),
        tuple(
            {link: TracedLink(delay / 1e3) for link, delay in delays.items() if delay}
            for delays in states.values()
        ),
    )


def train(model: Model, way: str, trace: LinkTrace, iterations: int) -> list[float]:
    """Milliseconds of each iteration of a way."""
    if SIMULATED_WAYS[way].adapted:
        return train_adapted(model, trace, iterations)
    return train_fixed(model, way, trace, iterations)


def train_fixed(model: Model, way: str, trace: LinkTrace, iterations: int) -> list[float]:
    """Milliseconds of each iteration of a schedule that is never changed. A delegated way delegates
    all links."""
    every = dict.fromkeys(range(model.stages - 1), 0.0)
    real = build_slow_problem(model, SIMULATED_WAYS[way], every)
    schedule, outside = choose_schedule(model, way, real), measure_outside(model)
    took, now = list[float](), 0.0
    for iteration in range(iterations):

        def find_delay(link: int, sent: float, index: int = iteration, began: float = now) -> float:
            moment = began + sent / 1e3 if trace.unit == "seconds" else float(index)
            return 1e3 * trace.get_links_at(moment).get(link, HEALTHY).delay

        took.append(simulate(schedule, real, delay_at=find_delay).makespan + outside)
        now += took[-1] / 1e3
    return took


def train_adapted(model: Model, trace: LinkTrace, iterations: int) -> list[float]:
    """Milliseconds of each iteration with the real detector, controller and planner."""
    healthy, outside = build_healthy_problem(model), measure_outside(model)
    stages = [stage.model_copy(update={"reduction": outside}) for stage in healthy.stages]
    found = replay_trace(
        healthy.model_copy(update={"stages": tuple(stages)}),
        trace,
        telemetry="python",
        iterations=iterations,
        known=ReplayResult(iterations, {}, []),
    )
    return [1e3 * seconds for seconds in found.runs["adaptive"].iteration_seconds]


def summarize_times(times: Sequence[float], together: int = 1) -> Spread:
    """Spread of some iterations: mean, and the least and largest mean of ``together`` in a row."""
    ends = range(together, len(times) + 1)
    means = [fmean(times[end - together : end]) for end in ends]
    return Spread(fmean(times), min(means), max(means))


def merge_spreads(found: list[Spread]) -> Spread:
    """Mean of the means, with the least and most of all."""
    return Spread(
        fmean(each.mean for each in found),
        min(each.least for each in found),
        max(each.most for each in found),
    )
