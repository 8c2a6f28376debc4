"""Random problems and schedules for property tests."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from pipemorph.planning import Link, Op, OpKind, Problem, Schedule, StageTimes

# Halves are exact in binary: sums in any order agree to the bit.
times = st.integers(0, 24).map(lambda halves: halves / 2)


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    max_stages: int = 5,
    max_microbatches: int = 8,
    limits: bool = True,
    queues: bool = True,
    half_duplex: bool = False,
) -> Problem:
    """Stages that differ, several slow links, caps from 1 up, queues, rates and bounded sends."""
    count = draw(st.integers(1, max_stages))
    cap = st.none() | st.integers(1, max_microbatches) if limits else st.none()
    bound = st.none() | st.integers(1, 3) if queues else st.none()
    links = []
    for _ in range(count - 1):
        held = draw(bound)
        half = half_duplex and held is not None and draw(st.booleans())
        links.append(
            Link(
                delay=draw(st.just(0.0) | times),
                transfer=draw(st.just(0.0) | times) if queues else 0.0,
                queues=held,
                outstanding=draw(bound),
                half_duplex=half,
            )
        )
    return Problem(
        microbatches=draw(st.integers(1, max_microbatches)),
        stages=tuple(
            StageTimes(
                forward=draw(times),
                backward_input=draw(times),
                backward_weight=draw(times),
                in_flight_limit=draw(cap),
            )
            for _ in range(count)
        ),
        links=tuple(links),
    )


@st.composite
def offloading(draw: st.DrawFn, *, fused: bool = True, **kwargs: bool | int) -> Problem:
    """:func:`problems` where some stages have a device limit, and some a fused backward of its
    own time, shorter or longer than both parts. What exceeds the limit is moved or recomputed."""
    problem = draw(problems(**kwargs))  # type: ignore[arg-type]
    stages = []
    for stage in problem.stages:
        most = min(problem.microbatches, stage.in_flight_limit or problem.microbatches)
        update: dict[str, object] = {"offload_copy": draw(times)}
        if draw(st.booleans()):
            update["device_limit"] = draw(st.integers(1, most))
            update["recompute"] = draw(st.booleans())
        if fused and draw(st.booleans()):
            update["fused_backward"] = draw(times)
        stages.append(stage.model_copy(update=update))
    return problem.model_copy(update={"stages": tuple(stages)})


def random_order(rng: random.Random, microbatches: int, *, fused: bool = False) -> tuple[Op, ...]:
    """Ops of one stage in any order the stage itself allows; it may deadlock with others."""
    f = b = w = 0
    ops = []
    while w < microbatches:
        ready = []
        if f < microbatches:
            ready.append(OpKind.F)
        if b < f:
            ready.append(OpKind.BW if fused else OpKind.B)
        if w < b:
            ready.append(OpKind.W)
        kind = rng.choice(ready)
        if kind is OpKind.F:
            ops.append(Op(kind, f))
            f += 1
        elif kind is OpKind.W:
            ops.append(Op(kind, w))
            w += 1
        else:
            ops.append(Op(kind, b))
            b += 1
            w += kind is OpKind.BW
    return tuple(ops)


def random_schedule(rng: random.Random, stages: int, microbatches: int) -> Schedule:
    """A schedule whose stages are well formed; about half of small ones deadlock."""
    return Schedule(
        microbatches,
        tuple(random_order(rng, microbatches, fused=rng.random() < 0.3) for _ in range(stages)),
    )
