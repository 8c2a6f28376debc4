"""Builds a planning problem from a finished run: measured op times, last known link delays."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import ValidationError

from pipemorph.control.first_plan import initial_routes
from pipemorph.control.job_state.stages import (
    MicrobatchFootprint,
    StageTable,
    get_expected_times,
    get_in_flight_limits,
)
from pipemorph.errors import InputError, one_line
from pipemorph.planning.ir import Route
from pipemorph.planning.planner import build_link
from pipemorph.planning.problem import Problem, StageTimes, describe_problem_error
from pipemorph.spec.job_spec import JobSpec
from pipemorph.yaml_json import read_text

LAST = 8
"""Number of last iterations whose median is the run's iteration time."""
MAX_BYTES = 1 << 30
"""Largest report to read (it lists every iteration), or timeline (at most 200,000 ops)."""
UNREADABLE = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
"""Errors that unexpected JSON causes; ValueError includes pydantic's ValidationError."""


@dataclass(frozen=True)
class MeasuredProblem:
    """Planning problem of a run in ms. ``iteration_ms``: median of the last iterations."""

    problem: Problem
    source: str
    iteration_ms: float | None


def is_run_report(path: str) -> bool:
    """True if a file is the report of a run, not a problem."""
    if not path.endswith(".json"):
        return False
    try:
        found = json.loads(read_text(path, MAX_BYTES))
    except (ValueError, RecursionError):
        return False  # load_problem() then reports the error
    return isinstance(found, dict) and "spec" in found and "iterations" in found


def load_measured_problem(path: str) -> MeasuredProblem:
    """The planning problem of a run, from its report. Raises :class:`InputError`, one line."""
    report = _read_result_file(Path(path))
    try:
        spec = JobSpec.model_validate(report["spec"])
    except ValidationError as error:
        raise InputError(f"{one_line(path)}: spec.{describe_problem_error(error)}") from None
    timeline = Path(path).with_name("timeline.json")
    stages = _read_op_times(timeline, spec) if timeline.exists() else None
    source = "op times measured in the run"
    if stages is None:
        stated = get_expected_times(spec)
        if stated is None:
            raise InputError(
                f"{one_line(path)}: has no op times, and there is no timeline.json in its "
                "folder to read them from"
            )
        stages = tuple(_convert_to_ms(stage) for stage in stated)
        source = "op times of the job's spec"
    if report.get("emulated"):
        source += " (EMULATED)"
    stages = tuple(map(_add_memory, stages, StageTable(spec).footprints))
    try:
        stages = _add_reductions(stages, report.get("reductions", []))
        delays, routes = _read_links(report, spec)
        iterations = [_parse_finite(each["seconds"]) for each in report["iterations"]]
        cut = spec.parallelism
        links = [build_link(route, delay) for route, delay in zip(routes, delays, strict=True)]
        problem = Problem(
            microbatches=spec.schedule.microbatches,
            stages=stages,
            links=tuple(links),
            policy=spec.schedule.policy_kind,
            dispatch=spec.schedule.dispatch_kind,
            ranks=cut.mesh.sizes["pp"] if cut.stages_per_rank > 1 else None,
            placement=cut.stage_placement,
            **_estimate_layers(stages, report, spec),
        )
    except UNREADABLE as error:
        raise InputError(_describe_invalid_file(path, "report", error)) from None
    return MeasuredProblem(
        problem, source, median(iterations[-LAST:]) * 1e3 if iterations else None
    )


def _read_result_file(path: Path) -> dict[str, Any]:
    """A result file of a run. Raises :class:`InputError`, one line."""
    try:
        found = json.loads(read_text(path, MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise InputError(_describe_invalid_file(path, path.stem, error)) from None
    if not isinstance(found, dict):
        raise InputError(_describe_invalid_file(path, path.stem, TypeError("not an object")))
    return found


def _describe_invalid_file(path: str | Path, what: str, error: Exception) -> str:
    detail = one_line(f"{type(error).__name__}: {error}")
    return f"{one_line(str(path))}: is not a valid {what} of a run ({detail})"


def _parse_finite(value: Any) -> float:
    """A finite number. Raises ValueError, or TypeError for a value that is not a number."""
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{number} is not a finite number")
    return number


def _convert_to_ms(stage: StageTimes) -> StageTimes:
    kinds = ("forward", "backward_input", "backward_weight", "fused_backward")
    times = {kind: getattr(stage, kind) for kind in kinds}
    return stage.model_copy(
        update={kind: time * 1e3 for kind, time in times.items() if time is not None}
    )


def _add_memory(stage: StageTimes, known: MicrobatchFootprint) -> StageTimes:
    """Add a microbatch's activation bytes and their copy time, if the job states them."""
    copy = known.offload_copy
    memory = {
        "activation_bytes": known.activation_bytes,
        "offload_copy": None if copy is None else copy * 1e3,
    }
    return stage.model_copy(update=memory)


def _add_reductions(
    stages: tuple[StageTimes, ...], reductions: Sequence[dict[str, Any]]
) -> tuple[StageTimes, ...]:
    """Add each stage's reduction after its last op, of the slowest data-parallel group."""
    exposed: dict[int, float] = {}
    for each in reductions:
        where, seconds = int(each["stage"]), max(0.0, _parse_finite(each["exposed"]))
        exposed[where] = max(exposed.get(where, 0.0), seconds * 1e3)
    return tuple(
        stage.model_copy(update={"reduction": exposed.get(i)}) for i, stage in enumerate(stages)
    )


def _estimate_layers(
    stages: Sequence[StageTimes], report: dict[str, Any], spec: JobSpec
) -> dict[str, Any]:
    """Fields ``layers`` and ``layer_split`` of a problem: equal layers that take what they take on
    the fastest stage, which is assumed to have no other work. Empty if their number is unknown, or
    if layers moved during the run."""
    total, count = spec.parallelism.layers, len(stages)
    if total is None or any(each.get("layers") for each in report.get("relayouts", [])):
        return {}
    held = total // count
    least = min(stages, key=lambda each: each.forward + each.backward_input + each.backward_weight)
    kinds = ("forward", "backward_input", "backward_weight")
    layer = {kind: getattr(least, kind) / held for kind in kinds} | {"count": total}
    return {"layers": [layer], "layer_split": [held] * count}


def _read_links(report: dict[str, Any], spec: JobSpec) -> tuple[list[float], list[Route]]:
    """Delay in ms and route of each link, as of the last plan."""
    routes = list(initial_routes(spec))
    delays = [0.0] * len(routes)
    applied = [a for a in report["adaptations"] if a.get("applied_at_iteration") is not None]
    if applied:
        routes = [Route(route) for route in applied[-1]["routes"]]
        for link in applied[-1]["links"]:
            where = int(link["link"])
            delays[where] = max(delays[where], float(link["delay"]) * 1e3)
    return delays, routes


def _read_op_times(path: Path, spec: JobSpec) -> tuple[StageTimes, ...] | None:
    """Median op times of every stage in a run's Chrome trace; None if a stage has no ops in it.

    A fused backward counts as B: the share of W in it is unknown.
    """
    trace = _read_result_file(path)
    limits = get_in_flight_limits(spec)
    took: list[dict[str, list[float]]] = [defaultdict(list) for _ in limits]
    try:
        for event in trace["traceEvents"]:
            if event["ph"] == "X" and event["cat"] in ("F", "B", "W", "BW"):
                took[event["tid"]][event["cat"]].append(_parse_finite(event["dur"]) / 1e3)
        return _compute_medians(took, limits)
    except UNREADABLE as error:
        raise InputError(_describe_invalid_file(path, "timeline", error)) from None


def _compute_medians(
    took: list[dict[str, list[float]]], limits: Sequence[int | None]
) -> tuple[StageTimes, ...] | None:
    """Median op times per stage. Raises pydantic.ValidationError for invalid times."""
    stages = []
    for ops, limit in zip(took, limits, strict=True):
        backward = ops["B"] or ops["BW"]
        if not ops["F"] or not backward:
            return None
        stages.append(
            StageTimes(
                forward=median(ops["F"]),
                backward_input=median(backward),
                backward_weight=median(ops["W"]) if ops["W"] else 0.0,
                in_flight_limit=limit,
            )
        )
    return tuple(stages)
