"""Experiments with emulated stages: real ranks, links, detection and control loop, by the clock."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

from pipemorph.reproduce.compared_figure import ComparedFigure, RunForm, compare
from pipemorph.reproduce.emulated_runs import build_job, run_job
from pipemorph.reproduce.experiments.iteration_experiments import format_delays
from pipemorph.reproduce.explanations import list_explanations
from pipemorph.reproduce.published import (
    WAYS,
    MeasuredIteration,
    Model,
    Spread,
    list_iterations,
    load_model,
    load_published,
    make_exact,
)

PHASE, SETTLING = 8, 4
"""Iterations under each delay, and how many of these at the start do not count: in the first one
the delay is detected, and the next ones run until their times are steady."""

EMULATED_WAYS: Mapping[str, Mapping[str, str]] = {
    "1f1b": {"policy": "1f1b", "route": "direct"},
    "zero-bubble": {"policy": "zero-bubble", "route": "direct", "duplex": "half"},
    "delegated": {"policy": "zero-bubble", "route": "delegated"},
    "adapted": {"policy": "pipemorph", "route": "auto"},
}


def run_emulated(form: RunForm) -> Iterator[ComparedFigure]:
    """Compare a growing delay of the last link, which the control loop has to detect."""
    model = load_model("14B")
    delays = (0.0, *(float(each) for each in (range(10, 70, 10) if form.full else (60,))))
    ways = tuple(WAYS) if form.full else ("zero-bubble", "adapted")
    times = {}
    for way in ways:
        form.note(f"  emulated: {WAYS[way]}, {PHASE * len(delays)} iterations")
        times[way] = run_phases(model, way, delays)
    # The constant of simulated iterations, fitted to emulated ones.
    outside = model.undisturbed["zero-bubble"] - times["zero-bubble"][0.0].mean
    every = list(list_iterations("delays"))
    undisturbed = {way: make_exact(ms) for way, ms in model.undisturbed.items()}
    for found in (MeasuredIteration(model, {}, undisturbed), *every):
        delay = max(found.delays.values(), default=0.0)
        for way, published in found.times.items():
            if way in times and delay in times[way]:
                yield compare(
                    format_delays(found.delays),
                    WAYS[way],
                    published,
                    Spread(*(ms + outside for ms in times[way][delay])),
                    method="emulated",
                    at=delay,
                    reasons=list_explanations(found, way, every) if delay else (),
                )
    growth: Mapping[str, float] = load_published()["gains"]["growth_at_60_of_14b"]
    for way, ours in times.items():
        yield compare(
            "60 ms on link 6, against no delay", WAYS[way], growth[way],
            (ours[60.0].mean + outside) / (ours[0.0].mean + outside), unit="×", method="emulated",
        )  # fmt: skip


def run_phases(model: Model, way: str, delays: tuple[float, ...]) -> dict[float, Spread]:
    """Run a job once, with each delay of the last link in turn. Returns settled milliseconds of an
    iteration by delay. Raises :class:`~pipemorph.reproduce.emulated_runs.FailedRunError`."""
    faults = [
        {"link": model.stages - 2, "fromIteration": k * PHASE, "toIteration": (k + 1) * PHASE}
        | {"delayMs": delay}
        for k, delay in enumerate(delays)
        if delay
    ]
    job = build_job(
        f"reproduce-{way}", model, iterations=PHASE * len(delays), faults=faults,
        **EMULATED_WAYS[way],
    )  # fmt: skip
    times = run_iterations(job)
    return {
        delay: summarize_settled(times[k * PHASE + SETTLING : (k + 1) * PHASE])
        for k, delay in enumerate(delays)
    }


def run_iterations(job: Mapping[str, object]) -> list[float]:
    """Run a job. Returns the milliseconds of each iteration."""
    with tempfile.TemporaryDirectory(prefix="pipemorph-reproduce-") as folder:
        report = run_job(Path(folder), job)
    return [1e3 * each["seconds"] for each in report["iterations"]]


def summarize_settled(times: list[float]) -> Spread:
    """Median of iterations, as another program may delay one, with the least and most."""
    return Spread(median(times), min(times), max(times))


def run_delegation(form: RunForm) -> Iterator[ComparedFigure]:
    """Compare what it costs to delegate all messages while no link is slow."""
    most = load_published()["delegation"]["overhead_percent"][1]
    for name in ("7B", "14B", "30B", "60B") if form.full else ("7B",):
        model, times = load_model(name), dict[str, Spread]()
        for route in ("direct", "delegated"):
            form.note(f"  emulated: {name}, {route}, {3 * PHASE} iterations")
            job = build_job(f"reproduce-{route}", model, "zero-bubble", 3 * PHASE, route=route)
            times[route] = summarize_settled(run_iterations(job)[SETTLING:])
        direct = times["direct"].mean
        yield compare(
            f"{name} ({model.parallelism}), one replica of one rank per stage",
            "zero-bubble, all links delegated",
            most,
            Spread(*(100 * (ms / direct - 1) for ms in times["delegated"])),
            unit="%",
            method="emulated",
            limit=True,
        )
