"""Experiments on traces of delays: redrawn at random, nine faults in turn, and a recorded hour."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from statistics import fmean

from pipemorph.reproduce.compared_figure import TOLERANCE, ComparedFigure, Reason, RunForm, compare
from pipemorph.reproduce.experiments.iteration_experiments import compare_iterations
from pipemorph.reproduce.explanations import NO_OVERLAP, is_near
from pipemorph.reproduce.pipeline_simulation import simulate_way
from pipemorph.reproduce.published import (
    WAYS,
    MeasuredIteration,
    Model,
    Spread,
    list_iterations,
    load_model,
    load_published,
    parse_times,
)
from pipemorph.reproduce.trace_training import (
    build_trace,
    merge_spreads,
    summarize_times,
    train,
    train_adapted,
)

HEALTHY_ITERATIONS, SETTLING_ITERATIONS = 7, 4
"""Iterations before delays are redrawn, and of these that do not count: in the first ones the
control loop detects them."""
PUBLISHED_ITERATIONS = 5
"""Iterations whose spread the logs give."""


# --- delays redrawn at random -----------------------------------------------------------------


def run_redrawn(form: RunForm) -> Iterator[ComparedFigure]:
    """Compare training while the delays of all links are redrawn."""
    found = load_published()["redrawn"]
    model, count = load_model(found["model"]), 60 if form.full else 20
    seeds = range(5 if form.full else 1)
    best = dict.fromkeys(("1f1b", "zero-bubble"), 0.0)
    for duration in found["durations"]:
        shortest, published = duration["shortest_ms"], parse_times(duration["ms"])
        form.note(f"  delays redrawn every {shortest} ms or later, {len(seeds)} times")
        traces = [draw_delays(model, shortest, f"{shortest} {seed}", count) for seed in seeds]
        ours = {}
        for way, theirs in published.items():
            runs = [train_redrawn(model, way, trace, count) for trace in traces]
            ours[way] = merge_spreads(runs)
            yield compare(
                f"new delays every {shortest} to {2 * shortest} ms",
                WAYS[way],
                theirs,
                ours[way],
                reasons=[partial(explain_as_steady, way, theirs, ours[way])],
            )
        for way, gain in best.items():
            best[way] = max(gain, ours[way].mean / ours["adapted"].mean)
    yield compare(
        "largest gain of PipeMorph",
        "over 1F1B or zero-bubble",
        found["gain"],
        max(best.values()),
        unit="×",
        reasons=[explain_by_logs],
    )


def draw_delays(
    model: Model, shortest_ms: float, seed: str, count: int
) -> dict[float, dict[int, float]]:
    """Draw delays as the authors' script: at each change, some links get a new delay from a normal
    distribution. Returns milliseconds by link, by second."""
    found, rng = load_published()["redrawn"], random.Random(seed)
    now = HEALTHY_ITERATIONS * model.undisturbed["zero-bubble"] / 1e3
    last = now + count * 4 * model.undisturbed["zero-bubble"] / 1e3
    links = range(model.stages - 1)
    delays, states = dict.fromkeys(links, 0.0), {0.0: dict[int, float]()}
    while now < last:
        for link in rng.sample(links, rng.randint(1, len(links))):
            delays[link] = max(0.0, rng.gauss(found["mean_ms"], found["deviation_ms"]))
        states[now] = dict(delays)
        now += rng.uniform(shortest_ms, 2 * shortest_ms) / 1e3
    return states


def train_redrawn(
    model: Model, way: str, delays: Mapping[float, Mapping[int, float]], count: int
) -> Spread:
    """Milliseconds of iterations under redrawn delays: their mean, and the least and largest mean
    of as many in a row as the logs give."""
    trace, begins = build_trace(delays, by_seconds=True), HEALTHY_ITERATIONS + SETTLING_ITERATIONS
    times = train(model, way, trace, begins + count)[begins:]
    return summarize_times(times, PUBLISHED_ITERATIONS)


def explain_as_steady(way: str, published: Spread, ours: Spread) -> Reason | None:
    """Check that steady delays of two links make published iterations of this way longer than
    simulated ones by as much."""
    ratios = [
        each.times[way].mean / simulate_way(each.model, way, each.delays)
        for each in list_iterations("links", "7B")
    ]
    least, most = min(ratios) * ours.least, max(ratios) * ours.most
    if way in ("delegated", "adapted") or not is_near(published, least, most):
        return None
    return Reason(
        *NO_OVERLAP,
        f"with two steadily slow links, published ones take {min(ratios):.2f} to"
        f" {max(ratios):.2f} times as long as simulated ones: {least:.0f} to {most:.0f} ms",
    )


def explain_by_logs() -> Reason | None:
    """Check that the logs of this experiment have a smaller gain than the paper's text."""
    found = load_published()["redrawn"]
    logged = max(
        duration["ms"][way][0] / duration["ms"]["adapted"][0]
        for duration in found["durations"]
        for way in ("1f1b", "zero-bubble")
    )
    if logged > found["gain"] * (1 - TOLERANCE):
        return None
    return Reason(
        "other runs",
        "The logs of this experiment have a smaller gain than the paper's text: it is of other"
        " runs.",
        f"{logged:.2f}× at most in the logs; without delegation, iterations differ as above",
    )


# --- nine faults in turn ----------------------------------------------------------------------


def run_faults(form: RunForm) -> Iterator[ComparedFigure]:
    """Compare training through the authors' trace of nine faults, or through a shortened one."""
    found = load_published()["faults"]
    model, shorter = load_model(found["model"]), 1 if form.full else 6
    states: dict[float, dict[int, float]] = {0.0: {}}
    states |= {
        at // shorter: {int(link): delay for link, delay in delays.items()}
        for at, delays in found["trace"]
    }
    count = found["iterations"] // shorter
    adapted = train_adapted(model, build_trace(states, by_seconds=False), count)
    every, begins = list(list_iterations("faults")), list(states)
    ends = [int(end) for at, end in pairwise(begins) if states[at]]
    settled = [summarize_times(adapted[end - PUBLISHED_ITERATIONS : end]) for end in ends]

    def measure(each: MeasuredIteration, way: str) -> Spread | float:
        if way == "adapted":
            return settled[every.index(each)]
        return simulate_way(model, way, each.delays)

    rows = list(compare_iterations("faults", measure))
    yield from rows
    for way, theirs in found["undisturbed_ms"].items():
        ours = simulate_way(model, way, {})
        yield compare(
            "no delay, after the nine", WAYS[way], Spread(*theirs["after"]), ours,
            reasons=[partial(explain_undisturbed, way, ours)],
        )  # fmt: skip
    times = {"adapted": adapted}
    for way in ("1f1b", "zero-bubble"):
        times[way] = [
            simulate_way(model, way, states[max(at for at in begins if at <= iteration)])
            for iteration in range(count)
        ]
    for way, theirs in found["per_minute"].items():
        yield compare(
            "iterations per minute, all",
            WAYS[way],
            theirs,
            60e3 / fmean(times[way]),
            unit="/min",
            reasons=[partial(explain_by_rows, [row for row in rows if row.way == WAYS[way]])],
        )


def explain_undisturbed(way: str, ours: float) -> Reason | None:
    """Check why published iterations without a delay take longer."""
    found = load_published()["faults"]
    times, lengths = found["undisturbed_ms"][way], found["sequence_length"]
    before, after = times["before"][0], times["after"][0]
    if after > before * (1 + TOLERANCE):
        return Reason(
            "stays slow",
            "Their iterations stay longer after the delays are over.",
            f"{before:.0f} ms after the first delay, {after:.0f} ms after the last one",
        )
    if lengths[way] > lengths["zero-bubble"] and ours < after:
        return Reason(
            "longer sequences",
            "Their script gives 1F1B longer sequences than the other ways.",
            f"{lengths[way]} tokens, and {lengths['zero-bubble']} with zero-bubble",
        )
    return None


def explain_by_rows(rows: list[ComparedFigure]) -> Reason | None:
    """Take the reason of most single delays that differ."""
    reasons = [row.reason for row in rows if row.reason]
    if not reasons:
        return None
    (name, sentence), count = Counter(reason[:2] for reason in reasons).most_common(1)[0]
    return Reason(name, sentence, f"{count} of {len(rows)} delays above differ for it")


# --- a recorded hour --------------------------------------------------------------------------


def run_hour(form: RunForm) -> Iterator[ComparedFigure]:
    """Compare training under delays with the published quantiles of a recorded hour."""
    found = load_published()["hour"]
    model = load_model(found["model"])
    holds = (1.0, 10.0, 60.0)
    count = 1000 if form.full else 60
    rates: dict[str, list[float]] = {way: [] for way in found["per_minute"]}
    for hold in holds:
        form.note(f"  {count} iterations, a delay for {hold:g} s each")
        trace = build_trace(draw_hour(model, hold, count), by_seconds=True)
        for way, found_rates in rates.items():
            found_rates.append(60e3 / fmean(train(model, way, trace, count)))
    for way, theirs in found["per_minute"].items():
        ours = summarize_times(rates[way])
        yield compare(
            "iterations per minute", WAYS[way], theirs, ours, unit="/min",
            reasons=[partial(explain_by_excess, model, way, theirs, ours)],
        )  # fmt: skip


def draw_hour(model: Model, hold: float, count: int) -> dict[float, dict[int, float]]:
    """Draw a delay of a link for each ``hold`` seconds. Returns milliseconds by link, by second."""
    rng, last = random.Random(f"hour {hold}"), count * 4 * model.undisturbed["1f1b"] / 1e3
    exponent = fit_exponent()
    return {
        k * hold: {rng.randrange(model.stages - 1): draw_delay(rng.random(), exponent)}
        for k in range(int(last / hold) + 1)
    }


def draw_delay(quantile: float, exponent: float) -> float:
    """Milliseconds of delay at a quantile: linear up to the published median, a power above it that
    meets the 99th percentile."""
    found = load_published()["hour"]["delay_ms"]
    if quantile < 0.5:
        return 2 * float(found["median"]) * quantile
    above: float = (found["p99"] - found["median"]) * ((quantile - 0.5) / 0.49) ** exponent
    return float(found["median"]) + above


def fit_exponent() -> float:
    """Exponent of :func:`draw_delay` with which the mean is the published one."""
    found = load_published()["hour"]["delay_ms"]
    low, high = 0.1, 10.0
    for _ in range(40):
        middle = (low + high) / 2
        above = (found["p99"] - found["median"]) * 0.49 / (middle + 1)
        mean = 0.75 * found["median"] + above * (0.5 / 0.49) ** (middle + 1)
        low, high = (middle, high) if mean > found["mean"] else (low, middle)
    return low


def explain_by_excess(model: Model, way: str, published: float, ours: Spread) -> Reason | None:
    """Check that the single delays of the nine faults make published iterations longer than
    simulated ones by as much."""
    alone = simulate_way(model, way, {})
    undisturbed = load_published()["faults"]["undisturbed_ms"][way]["after"][0]
    factors = [
        (each.times[way].mean - undisturbed) / (simulate_way(model, way, each.delays) - alone)
        for each in list_iterations("faults")
    ]
    slower = [
        60e3 / (alone + (60e3 / rate - alone) * factor)
        for rate, factor in ((ours.least, max(factors)), (ours.most, min(factors)))
    ]
    if not is_near(Spread(published, published, published), *slower):
        return None
    return Reason(
        *NO_OVERLAP,
        f"the nine faults cost {min(factors):.2f} to {max(factors):.2f} times what is simulated:"
        f" {slower[0]:.1f} to {slower[1]:.1f}/min",
    )
