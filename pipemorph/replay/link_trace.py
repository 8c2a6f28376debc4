"""Traces of link states: one JSON object a line, each replacing the state before it."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipemorph.errors import InputError, one_line
from pipemorph.yaml_json import read_text

MAX_BYTES = 16 << 20
"""Largest trace file."""
TAIL_ITERATIONS = 20
"""Iterations after the last line of a trace."""


class _LinkEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    delay_ms: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False, strict=False)] = 0.0
    gbps: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False, strict=False)] | None = None
    jitter_ms: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False, strict=False)] = 0.0
    down: bool = False


class _ReductionEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    delay_ms: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False, strict=False)]


class _StageEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    slowdown: Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False, strict=False)] = 1.0
    pause_ms: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False, strict=False)] = 0.0


class _TraceLine(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    at_iteration: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    at_seconds: Annotated[float, Field(ge=0, le=1e9, strict=False)] | None = None
    links: dict[Annotated[str, Field(pattern=r"^\d{1,4}(@\d{1,4})?$")], _LinkEntry]
    reductions: dict[Annotated[str, Field(pattern=r"^\d{1,4}$")], _ReductionEntry] = {}
    stages: dict[Annotated[str, Field(pattern=r"^\d{1,4}$")], _StageEntry] = {}


class TracedLink(NamedTuple):
    """State of a link. ``delay``: seconds added to the link's own; ``gbps``: its rate, None for its
    own. ``jitter``: most seconds of delay drawn for each message in addition. ``down``: the direct
    route carries nothing."""

    delay: float = 0.0
    gbps: float | None = None
    jitter: float = 0.0
    down: bool = False

    @property
    def mean_delay(self) -> float:
        """Mean added delay of messages, seconds."""
        return self.delay + self.jitter / 2


class TracedStage(NamedTuple):
    """State of a stage. ``slowdown``: factor on the time of its ops; ``pause``: seconds for which
    its rank stops at the start of each iteration."""

    slowdown: float = 1.0
    pause: float = 0.0


@dataclass(frozen=True)
class LinkTrace:
    """Trace of link states. ``states[k][link]`` holds from ``since[k]`` on; links without a state
    are healthy. ``unit``: that of ``since``, iterations or seconds of training.
    ``others[k][replica]``: states in replicas other than 0. ``reduction_delays[k][stage]``: delay
    of a stage's gradient reduction, seconds. ``stages[k][stage]``: slow or pausing stages of
    replica 0."""

    unit: Literal["iterations", "seconds"]
    since: tuple[float, ...]
    states: tuple[Mapping[int, TracedLink], ...]
    replica_states: tuple[Mapping[int, Mapping[int, TracedLink]], ...] = ()
    reduction_delays: tuple[Mapping[int, float], ...] = ()
    stages: tuple[Mapping[int, TracedStage], ...] = ()

    def get_links_at(self, moment: float) -> Mapping[int, TracedLink]:
        """Links with a fault at an iteration or a second of training."""
        index = bisect_right(self.since, moment) - 1
        return self.states[index] if index >= 0 else {}

    def find_recovery(self, link: int, moment: float) -> float | None:
        """End of the outage of a link's direct route at ``moment``: infinity if no line ends it;
        None if the route is up."""
        index = bisect_right(self.since, moment) - 1
        if index < 0 or not self._is_down(link, index):
            return None
        later = range(index + 1, len(self.since))
        return next((self.since[k] for k in later if not self._is_down(link, k)), math.inf)

    def _is_down(self, link: int, index: int) -> bool:
        state = self.states[index].get(link)
        return state is not None and state.down

    def get_reduction_delays_at(self, moment: float) -> Mapping[int, float]:
        """Delayed reductions at a moment: seconds by stage."""
        index = bisect_right(self.since, moment) - 1
        return self.reduction_delays[index] if index >= 0 and self.reduction_delays else {}

    def get_slow_stages_at(self, moment: float) -> Mapping[int, TracedStage]:
        """Slow or pausing stages at a moment."""
        index = bisect_right(self.since, moment) - 1
        return self.stages[index] if index >= 0 and self.stages else {}

    def select_replica(self, replica: int) -> LinkTrace:
        """Trace of a replica."""
        if not replica:
            return self
        others = self.replica_states or ({},) * len(self.since)
        return replace(self, states=tuple(each.get(replica, {}) for each in others), stages=())

    @property
    def last_moment(self) -> float:
        """Moment of the last line."""
        return self.since[-1]


def load_trace(path: str, links: int, replicas: int = 1) -> LinkTrace:
    """Read a trace for a job with ``links`` links and ``replicas`` replicas. The
    :class:`InputError` of a bad line names it."""
    return parse_trace(read_text(path, MAX_BYTES), links, path, replicas)


def parse_trace(text: str, links: int, name: str = "the trace", replicas: int = 1) -> LinkTrace:
    """Parse the text of a trace, see :func:`load_trace`."""
    units: list[Literal["iterations", "seconds"]] = []
    since: list[float] = []
    states: list[dict[int, dict[int, TracedLink]]] = []
    late: list[Mapping[int, float]] = []
    stages: list[Mapping[int, TracedStage]] = []
    for number, raw in enumerate(text.splitlines(), 1):
        if not raw.strip():
            continue
        where = f"{name}, line {number}"
        line = _parse_line(raw, where)
        if (line.at_iteration is None) == (line.at_seconds is None):
            raise InputError(f"{where}: expected either at_iteration or at_seconds")
        at = line.at_seconds if line.at_iteration is None else float(line.at_iteration)
        assert at is not None
        units.append("seconds" if line.at_iteration is None else "iterations")
        if units[-1] != units[0]:
            raise InputError(f"{where}: the lines before it are by {units[0]}; use one unit")
        if since and at <= since[-1]:
            raise InputError(f"{where}: is at {at:g}, the line before it at {since[-1]:g}")
        by_replica: dict[int, dict[int, TracedLink]] = {0: {}}
        for key, state in line.links.items():
            link, _, replica = key.partition("@")
            if int(link) >= links:
                raise InputError(f"{where}: there is no link {link}; the problem has {links}")
            if int(replica or 0) >= replicas:
                raise InputError(
                    f"{where}: there is no replica {replica}, as of link {key}; the job has"
                    f" {replicas}, see --replicas"
                )
            mine = by_replica.setdefault(int(replica or 0), {})
            mine[int(link)] = TracedLink(
                state.delay_ms / 1e3, state.gbps, state.jitter_ms / 1e3, state.down
            )
        for stage in line.reductions:
            if int(stage) > links or replicas == 1:
                raise InputError(
                    f"{where}: stage {stage} reduces no gradients; the problem has {links + 1}"
                    f" stages of {replicas} replicas, see --replicas"
                )
        for stage in line.stages:
            if int(stage) > links:
                raise InputError(f"{where}: there is no stage {stage}; the problem has {links + 1}")
        since.append(at)
        states.append(by_replica)
        late.append({int(k): v.delay_ms / 1e3 for k, v in line.reductions.items()})
        stages.append(
            {int(k): TracedStage(v.slowdown, v.pause_ms / 1e3) for k, v in line.stages.items()}
        )
    if not since:
        raise InputError(f"{name} has no lines")
    return LinkTrace(
        units[0], tuple(since), tuple(each[0] for each in states), tuple(states), tuple(late),
        tuple(stages),
    )  # fmt: skip


def _parse_line(raw: str, where: str) -> _TraceLine:
    try:
        data: Any = json.loads(raw)
    except (ValueError, RecursionError):
        raise InputError(f"{where}: is not JSON") from None
    try:
        return _TraceLine.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the line"
        raise InputError(f"{where}: {field}: {one_line(first['msg'])}") from None
