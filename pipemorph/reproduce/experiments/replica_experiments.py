"""Experiment on a slow link inside a ring of replicas, and ranks that change places."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pipemorph.control.decide.layouts.layout_search import NetworkMeasurements, propose_places
from pipemorph.planning import StageTimes
from pipemorph.protocol import Health, LinkState, ReductionHealth, SlowestEdge
from pipemorph.reproduce.compared_figure import ComparedFigure, Reason, RunForm, compare
from pipemorph.reproduce.explanations import explain_blocked_stage, is_near
from pipemorph.reproduce.pipeline_simulation import (
    build_healthy_problem,
    measure_outside,
    simulate_way,
)
from pipemorph.reproduce.published import (
    WAYS,
    MeasuredIteration,
    Model,
    Spread,
    load_model,
    load_published,
    make_exact,
)
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.layout import Layout, Wire

SLOW_WIRE: Wire = (0, 1)
"""Pods of the two replicas of stage 0, between which the network is slow."""
ITERATIONS = 1000
USUAL_MS = 1.0
"""Usual milliseconds of an edge of the ring; of no influence, as the cost of the delay is given."""


def run_replicas(_: RunForm) -> Iterator[ComparedFigure]:
    """Compare a slow link in a ring of replicas with the same link between stages."""
    found = load_published()["replicas"]
    undisturbed, *in_ring = found["reduction_ms"]
    model = load_model(found["model"])._replace(
        replicas=found["replicas"], undisturbed={"zero-bubble": undisturbed}
    )
    link = model.stages - 2
    names = {"remapped_ms": "zero-bubble", "delegated_ms": "delegated", "adapted_ms": "adapted"}
    for k, delay in enumerate(found["delay_ms"]):
        times = {way: make_exact(found[key][k]) for key, way in names.items()}
        measured = MeasuredIteration(model, {link: delay}, times)
        for way, published in times.items():
            ours = simulate_way(model, way, {link: delay})
            explain = partial(explain_blocked_stage, measured, way)
            if way != "zero-bubble":
                explain = partial(explain_growth, published, ours, undisturbed)
            yield compare(
                f"{delay} ms, the slow link re-mapped between stages {link} and {link + 1}",
                WAYS[way],
                published,
                ours,
                reasons=[explain],
            )
    remapped = simulate_way(model, "zero-bubble", {link: delay})
    case = f"{delay} ms: times faster"
    yield compare(
        case, "by re-mapping", found["gain"]["remapped"], in_ring[-1] / remapped, unit="×"
    )
    yield compare(
        case, "by delegation and adaptation, in addition", found["gain"]["adapted"],
        remapped / simulate_way(model, "adapted", {link: delay}), unit="×",
    )  # fmt: skip
    layout, seconds = propose_layout(model, delay, in_ring[-1] - undisturbed)
    yield compare(
        f"{delay} ms, places by PipeMorph's own search",
        WAYS["adapted"],
        found["adapted_ms"][-1],
        1e3 * seconds,
        reasons=[partial(explain_unused_wire, layout)],
    )


def explain_growth(published: Spread, ours: float, undisturbed: float) -> Reason | None:
    """Check that published iterations grow before the link is slow, by as much as they differ."""
    before = load_published()["replicas"]["before_delay_ms"]
    first, last = before["third"], before["seventh"]
    if not is_near(published, ours + last - undisturbed, ours + last - first):
        return None
    return Reason(
        "growing iterations",
        "Their iterations of the delegated runs become longer before the link is slow.",
        f"{first} ms in the third iteration, {last} ms in the seventh, which still has no delay",
    )


def propose_layout(model: Model, delay_ms: float, cost_ms: float) -> tuple[Layout, float]:
    """Propose places for the ranks while the ring of stage 0 has a slow edge, which makes its
    reduction ``cost_ms`` longer. Returns the layout, and predicted seconds of an iteration."""
    spec = JobSpec.model_validate(
        {
            "parallelism": {"stages": model.stages, "replicas": model.replicas},
            "schedule": {"microbatches": model.microbatches},
            "trainer": {"module": "train", "iterations": ITERATIONS},
            "failurePolicy": {"maxRestarts": 1},
            "adaptation": {"relayout": True},
        }
    )
    usual, delay = USUAL_MS / 1e3, delay_ms / 1e3
    outside, cost = measure_outside(model) / 1e3, cost_ms / 1e3

    def measure_ring(stage: int) -> ReductionHealth:
        slow = stage == 0
        seconds = outside + cost * slow
        edge = SlowestEdge(0, usual + delay * slow, usual)
        return ReductionHealth(stage, 0, "", slow, seconds, outside, seconds, 1, edge)

    network = NetworkMeasurements(
        stages=tuple(
            StageTimes(
                forward=stage.forward / 1e3,
                backward_input=stage.backward_input / 1e3,
                backward_weight=stage.backward_weight / 1e3,
            )
            for stage in build_healthy_problem(model).stages
        ),
        links=tuple(LinkState(i, Health.HEALTHY, 0.0) for i in range(model.stages - 1)),
        reductions=tuple(map(measure_ring, range(model.stages))),
        barrier=True,
        iterations_remaining=ITERATIONS,
    )
    first = Layout.from_parallelism(spec.parallelism)
    found = propose_places(spec, first, network, {SLOW_WIRE: delay}, 0.0)
    assert found is not None
    return found.layout, found.seconds_after


def explain_unused_wire(layout: Layout) -> Reason | None:
    """Check that no neighbours use the slow link in a layout."""
    links = {
        layout.find_link_wire(link, column)
        for link in range(layout.mesh.stages - 1)
        for column in range(layout.mesh.columns)
    }
    if SLOW_WIRE in links | {w for ring in layout.rings for w in layout.find_ring_wires(ring)}:
        return None
    moved = layout.find_moved_ranks(Layout.build_first(layout.mesh))
    return Reason(
        "unused link",
        "The search finds places in which the slow link joins no two ranks that exchange anything;"
        " the published re-mapping puts it between two stages.",
        f"ranks {', '.join(map(str, moved))} move; no ring and no link between stages uses it",
    )
