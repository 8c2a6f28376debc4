"""Experiments on single iterations: planned and simulated for each delay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean

from pipemorph.planning import Link, Policy, Problem, StageTimes, plan, simulate
from pipemorph.reproduce.compared_figure import TOLERANCE, ComparedFigure, Reason, RunForm, compare
from pipemorph.reproduce.explanations import NO_OVERLAP, list_explanations
from pipemorph.reproduce.pipeline_simulation import Delays, simulate_way
from pipemorph.reproduce.published import (
    WAYS,
    MeasuredIteration,
    Spread,
    list_iterations,
    load_model,
    load_published,
)


def format_delays(delays: Delays) -> str:
    """Slow links in words, such as ``30 ms on links 0 and 1``."""
    if not delays:
        return "no delay"
    *others, last = map(str, delays)
    links = f"links {', '.join(others)} and {last}" if others else f"link {last}"
    return f"{next(iter(delays.values())):g} ms on {links}"


def simulate_measured(found: MeasuredIteration, way: str) -> float:
    """Milliseconds of the simulated iteration."""
    return simulate_way(found.model, way, found.delays)


def compare_iterations(
    experiment: str,
    measure: Callable[[MeasuredIteration, str], Spread | float] = simulate_measured,
) -> Iterator[ComparedFigure]:
    """Compare the iteration times of an experiment, for every way. ``measure``: returns ours."""
    every = list(list_iterations(experiment))
    several = len({found.model.name for found in every}) > 1
    grows = len({tuple(found.delays) for found in every}) == 1
    for found in every:
        model = found.model
        others = [each for each in every if each.model.name == model.name]
        name = f"{model.name} ({model.parallelism}): " if several else ""
        for way, published in found.times.items():
            yield compare(
                name + format_delays(found.delays),
                WAYS[way],
                published,
                measure(found, way),
                at=max(found.delays.values()) if grows else None,
                reasons=list_explanations(found, way, others),
            )


def run_example(_: RunForm) -> Iterator[ComparedFigure]:
    """Compare zero-bubble, planned without a delay and executed with one; add our plan for it."""
    example = load_published()["example"]
    ms = example["op_ms"]
    healthy = Problem(
        microbatches=example["microbatches"],
        stages=(StageTimes(forward=ms, backward_input=ms, backward_weight=ms),) * example["stages"],
        links=(Link(),) * (example["stages"] - 1),
    )
    fixed = plan(healthy, Policy.ZERO_BUBBLE).schedule
    for text, published in example["ms_by_delay"].items():
        delay = float(text)
        slow = (Link(delay=delay), *healthy.links[1:])
        problem = healthy.model_copy(update={"links": slow})
        case = format_delays({0: delay} if delay else {})
        took = simulate(fixed, problem).makespan
        yield compare(case, "zero-bubble, planned for no delay", float(published), took)
        if delay:
            adapted = plan(problem, Policy.PIPEMORPH)
            yield compare(case, "PipeMorph, planned for the delay", None, adapted.makespan)


def run_delays(_: RunForm) -> Iterator[ComparedFigure]:
    """Compare iterations under a growing delay of the last link."""
    model = load_model("14B")
    for way, published in model.undisturbed.items():
        ours = simulate_way(model, way, {})
        yield compare("no delay", WAYS[way], float(published), ours, at=0.0)
    yield from compare_iterations("delays")
    growth: Mapping[str, float] = load_published()["gains"]["growth_at_60_of_14b"]
    last = {model.stages - 2: 60.0}
    for way, theirs in growth.items():
        grown = simulate_way(model, way, last) / simulate_way(model, way, {})
        case = f"{format_delays(last)}, against no delay"
        yield compare(case, WAYS[way], theirs, grown, unit="×")


def run_links(_: RunForm) -> Iterator[ComparedFigure]:
    """Compare two and three slow links, and the time that PipeMorph saves on average."""
    yield from compare_iterations("links")
    saved: Mapping[str, float] = load_published()["gains"]["less_time_with_several_links"]
    every = list(list_iterations("links", "14B"))
    for way, theirs in saved.items():
        ours = [
            1 - simulate_way(each.model, "adapted", each.delays)
            / simulate_way(each.model, way, each.delays)
            for each in every
        ]  # fmt: skip
        yield compare(
            "14B: time that PipeMorph saves, mean",
            f"against {WAYS[way]}",
            theirs,
            100 * fmean(ours),
            unit="%",
            reasons=[partial(_explain_saving, every, way, theirs)],
        )


def _explain_saving(
    every: Sequence[MeasuredIteration], way: str, published: float
) -> Reason | None:
    """Check that the published times of the baseline, and ours of PipeMorph, give the published
    saving."""
    ours = [
        1 - simulate_way(each.model, "adapted", each.delays) / each.times[way].mean
        for each in every
    ]
    saving = 100 * fmean(ours)
    if abs(saving / published - 1) > TOLERANCE:
        return None
    return Reason(*NO_OVERLAP, f"against the published times of {WAYS[way]}: {saving:.1f} %")


def run_models(_: RunForm) -> Iterator[ComparedFigure]:
    """Compare one slow link for each model, the gains over them, and the growth from 30 ms on."""
    rows = list(compare_iterations("models"))
    yield from rows
    every = list(list_iterations("models"))
    growth: Mapping[str, float] = load_published()["gains"]["growth_30_to_60"]
    yield from compare_gains(every, rows)
    for way, theirs in growth.items():
        ratios = [
            simulate_way(each.model, way, dict.fromkeys(each.delays, 60.0))
            / simulate_way(each.model, way, each.delays)
            for each in every
            if set(each.delays.values()) == {30.0}
        ]
        yield compare("60 ms against 30 ms, mean", WAYS[way], theirs, fmean(ratios), unit="×")


def compare_gains(
    every: Sequence[MeasuredIteration], rows: Sequence[ComparedFigure]
) -> Iterator[ComparedFigure]:
    """Compare the largest and least gain of PipeMorph. ``rows``: all ways of ``every``, in turn."""
    gains = load_published()["gains"]
    for what, choose, way, theirs in (
        ("largest gain of PipeMorph", max, "1f1b", gains["over_1f1b"]),
        ("largest gain of PipeMorph", max, "zero-bubble", gains["over_zero_bubble"]),
        ("least gain of PipeMorph", min, "zero-bubble", gains["range"][0]),
    ):
        ours = choose(
            simulate_way(each.model, way, each.delays)
            / simulate_way(each.model, "adapted", each.delays)
            for each in every
        )
        published = [each.times[way].mean / each.times["adapted"].mean for each in every]
        k = published.index(choose(published))
        compared = dict(zip(WAYS, rows[len(WAYS) * k : len(WAYS) * (k + 1)], strict=True))

        def explain(
            pair: tuple[ComparedFigure, ...] = (compared[way], compared["adapted"]),
            ratio: float = published[k],
        ) -> Reason | None:
            """Name the condition of the published extreme, if a figure of it differs."""
            differ = [row for row in pair if not row.agrees and row.reason]
            return (
                differ[0].reason
                and Reason(
                    differ[0].reason.name,
                    differ[0].reason.sentence,
                    f"the published figure is that of {pair[0].case} ({ratio:.2f}×), where"
                    f" {differ[0].way} differs",
                )
                if differ
                else None
            )

        yield compare(what, f"over {WAYS[way]}", theirs, ours, unit="×", reasons=[explain])
