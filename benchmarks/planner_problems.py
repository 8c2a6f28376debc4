"""Seeded problems that compare planners, and known facts about their optima.

``problem_set()`` makes the same problems everywhere. ``planner_facts.json`` has, for each, the
makespan and bound that a constraint solver (CP-SAT of OR-tools) found within the time limit, and
true if the makespan is proven optimal.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pipemorph.planning import Link, Problem, Route, StageTimes, build_link

FACTS = Path(__file__).with_name("planner_facts.json")
SEED = 1
PER_KIND = 30
SHAPES = ("uniform", "uneven", "multi-link")
CAPS: dict[str, Callable[[int], int | None]] = {
    "none": lambda stages: None,
    "2S": lambda stages: 2 * stages,
    "S+2": lambda stages: stages + 2,
}

LARGE_STAGES = (16, 32)
LARGE_PER_KIND = 12
LARGE_CAPS: dict[str, Callable[[int], int | None]] = CAPS | {"S": lambda stages: stages}
PROFILES = ((10, 10.5, 5.5), (11, 10, 4), (10, 10, 10), (10, 12, 8), (10, 10, 6), (10, 11, 7))
"""Times of F, B and W, in proportions as measured for models of 7B to 140B parameters."""


class ProblemCase(NamedTuple):
    """Problem in milliseconds. ``key`` names it in the facts."""

    key: str
    shape: str
    cap: str
    problem: Problem


def problem_set(per_kind: int = PER_KIND, seed: int = SEED) -> list[ProblemCase]:
    """Make ``per_kind`` problems for each shape under each cap.

    S 2–8, N 6–24. uniform: equal stages, one slow link; uneven: op times 0.7–1.3 of each other,
    one slow link; multi-link: stages uneven or not, two to four slow links.
    """
    cases = []
    for shape in SHAPES:
        for cap, limit in CAPS.items():
            for index in range(per_kind):
                key = f"{shape}/{cap}/{index}"
                problem = _make_problem(random.Random(f"{seed}/{key}"), shape, limit)
                cases.append(ProblemCase(key, shape, cap, problem))
    return cases


def sized_problem(shape: str, cap: str, stages: int, microbatches: int, index: int) -> Problem:
    """Problem of the same kind with any size, to measure the time to plan; optimum unknown."""
    rng = random.Random(f"{SEED}/{shape}/{cap}/{stages}x{microbatches}/{index}")
    return _make_problem(rng, shape, CAPS[cap], (stages, microbatches))


def _make_problem(
    rng: random.Random,
    shape: str,
    cap: Callable[[int], int | None],
    size: tuple[int, int] | None = None,
) -> Problem:
    stages, microbatches = size or (rng.randint(2, 8), rng.randint(6, 24))
    uneven = shape == "uneven" or (shape == "multi-link" and rng.random() < 0.5)
    slow = rng.randint(2, 4) if shape == "multi-link" else 1
    base = (10.0, rng.choice((10.0, 10.5, 12.0, 20.0)), rng.choice((5.5, 8.0, 10.0)))
    delays = [0.0] * (stages - 1)
    for _ in range(slow):
        delays[rng.randrange(stages - 1)] = rng.choice((10.0, 20.0, 30.0, 60.0))
    times = []
    for _ in range(stages):
        f, b, w = (round(t * (rng.uniform(0.7, 1.3) if uneven else 1), 1) for t in base)
        times.append(
            StageTimes(forward=f, backward_input=b, backward_weight=w, in_flight_limit=cap(stages))
        )
    return Problem(
        microbatches=microbatches,
        stages=tuple(times),
        links=tuple(Link(delay=delay) for delay in delays),
    )


def large_problem(stages: int, cap: str, index: int) -> Problem:
    """Problem with N = 3S, each stage by one of :data:`PROFILES`, 4 to 8 slow links of 10 to
    120 ms. Times and delays are equal under each cap; the optimum is unknown."""
    rng = random.Random(f"{SEED}/large/{stages}/{index}")
    limit = LARGE_CAPS[cap](stages)
    times = []
    for _ in range(stages):
        f, b, w = rng.choice(PROFILES)
        times.append(
            StageTimes(forward=f, backward_input=b, backward_weight=w, in_flight_limit=limit)
        )
    delays = [0.0] * (stages - 1)
    for link in rng.sample(range(stages - 1), rng.randint(4, 8)):
        delays[link] = rng.choice((10.0, 20.0, 30.0, 40.0, 60.0, 80.0, 120.0))
    return Problem(
        microbatches=3 * stages,
        stages=tuple(times),
        links=tuple(Link(delay=delay) for delay in delays),
    )


def harder_problems(stages: int, microbatches: int, index: int) -> dict[str, Problem]:
    """Problems with several slow links under a cap of S+2, and further choices: routes of links,
    backwards that may be fused, activations that may go to host memory."""
    problem = sized_problem("multi-link", "S+2", stages, microbatches, index)

    def with_links(route: Route, *, half_duplex: bool = False) -> Problem:
        links = (build_link(route, each.delay, half_duplex=half_duplex) for each in problem.links)
        return problem.model_copy(update={"links": tuple(links)})

    fused = [
        stage.model_copy(
            update={"fused_backward": 0.8 * (stage.backward_input + stage.backward_weight)}
        )
        for stage in problem.stages
    ]
    offloading = [
        stage.model_copy(
            update={"in_flight_limit": None, "device_limit": stages + 2, "offload_copy": 1.0}
        )
        for stage in problem.stages
    ]
    return {
        "nothing else": problem,
        "delegated routes": with_links(Route.DELEGATED),
        "direct routes": with_links(Route.DIRECT),
        "direct routes, half duplex": with_links(Route.DIRECT, half_duplex=True),
        "a fused backward, 0.8 of B + W": problem.model_copy(update={"stages": tuple(fused)}),
        "offload, device limit S+2": problem.model_copy(update={"stages": tuple(offloading)}),
    }


def hash_problem(problem: Problem) -> str:
    """Hash of a problem, which detects facts about another version of it."""
    data = problem.model_dump(mode="json", exclude_none=True)
    # The facts predate rates of links, objectives, placements, recomputation and uneven costs.
    del data["reorder"]
    for link in data["links"]:
        if not link["transfer"]:
            del link["transfer"]
    if data["objective"] == "makespan":
        del data["objective"]
    if data["placement"] == "interleaved":
        del data["placement"]
    for stage in data["stages"]:
        if not stage["recompute"]:
            del stage["recompute"]
    text = json.dumps(data, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def load_facts() -> dict[str, Any]:
    """Load ``{"seed", "per_kind", "problems": {key: {"digest", "optimum", "bound", "proven",
    "time_limit", "seconds"}}}``; without the file, the problems are empty."""
    if not FACTS.exists():
        return {"seed": SEED, "per_kind": PER_KIND, "problems": {}}
    facts: dict[str, Any] = json.loads(FACTS.read_text())
    return facts
