"""Traces of link states: one JSON object a line, each replacing the state before it."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipemorph.document import read_text
from pipemorph.errors import InputError, one_line

MAX_BYTES = 16 << 20
"""Largest trace file."""
TAIL = 20
"""Iterations that are run after the last line of a trace."""


class _TracedLink(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    delay_ms: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False, strict=False)] = 0.0
    gbps: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False, strict=False)] | None = None
    jitter_ms: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False, strict=False)] = 0.0
    down: bool = False


class _ReductionState(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    delay_ms: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False, strict=False)]


class _StageState(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    slowdown: Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False, strict=False)] = 1.0
    pause_ms: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False, strict=False)] = 0.0


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    at_iteration: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    at_seconds: Annotated[float, Field(ge=0, le=1e9, strict=False)] | None = None
    links: dict[Annotated[str, Field(pattern=r"^\d{1,4}(@\d{1,4})?$")], _TracedLink]
    reductions: dict[Annotated[str, Field(pattern=r"^\d{1,4}$")], _ReductionState] = {}
    stages: dict[Annotated[str, Field(pattern=r"^\d{1,4}$")], _StageState] = {}


class TracedLink(NamedTuple):
    """``delay``: seconds added to the link's own delay; ``gbps``: its rate, None for its own.
    ``jitter``: seconds, most of what is drawn for each message and added as well. ``down``: the
    direct route carries nothing."""

    delay: float = 0.0
    gbps: float | None = None
    jitter: float = 0.0
    down: bool = False

    @property
    def mean(self) -> float:
        """Mean delay of messages, without the link's own."""
        return self.delay + self.jitter / 2


class TracedStage(NamedTuple):
    """``slowdown``: times as long as each of its ops takes; ``pause``: seconds for which its rank
    stops at the begin of each iteration."""

    slowdown: float = 1.0
    pause: float = 0.0


@dataclass(frozen=True)
class LinkTrace:
    """``states[k][link]`` holds from ``since[k]`` on; links that it does not name are well.
    ``unit``: what ``since`` counts, iterations or seconds of training. ``others[k][replica]``: the
    same in replicas other than 0. ``late[k][stage]``: seconds by which the gradient reduction of a
    stage ends later. ``stages[k][stage]``: stages of replica 0 that are not well."""

    unit: Literal["iterations", "seconds"]
    since: tuple[float, ...]
    states: tuple[Mapping[int, TracedLink], ...]
    others: tuple[Mapping[int, Mapping[int, TracedLink]], ...] = ()
    late: tuple[Mapping[int, float], ...] = ()
    stages: tuple[Mapping[int, TracedStage], ...] = ()

    def at(self, moment: float) -> Mapping[int, TracedLink]:
        """The links that are not well at an iteration or a second of training."""
        index = bisect_right(self.since, moment) - 1
        return self.states[index] if index >= 0 else {}

    def down_until(self, link: int, moment: float) -> float | None:
        """Until when the direct route of a link carries nothing that does not at ``moment``:
        infinity if no line says that it does again. None if it does at ``moment``."""
        index = bisect_right(self.since, moment) - 1
        if index < 0 or not self._is_down(link, index):
            return None
        later = range(index + 1, len(self.since))
        return next((self.since[k] for k in later if not self._is_down(link, k)), math.inf)

    def _is_down(self, link: int, index: int) -> bool:
        state = self.states[index].get(link)
        return state is not None and state.down

    def late_at(self, moment: float) -> Mapping[int, float]:
        """The reductions that are not well."""
        index = bisect_right(self.since, moment) - 1
        return self.late[index] if index >= 0 and self.late else {}

    def stages_at(self, moment: float) -> Mapping[int, TracedStage]:
        """The stages that are not well."""
        index = bisect_right(self.since, moment) - 1
        return self.stages[index] if index >= 0 and self.stages else {}

    def of(self, replica: int) -> LinkTrace:
        """What holds for one replica."""
        if not replica:
            return self
        others = self.others or ({},) * len(self.since)
        return replace(self, states=tuple(each.get(replica, {}) for each in others), stages=())

    @property
    def last(self) -> float:
        return self.since[-1]


def load_trace(path: str, links: int, replicas: int = 1) -> LinkTrace:
    """Read a trace for a job with so many links, and replicas. Raises :class:`InputError` that
    names the line."""
    return parse_trace(read_text(path, MAX_BYTES), links, path, replicas)


def parse_trace(text: str, links: int, name: str = "the trace", replicas: int = 1) -> LinkTrace:
    """The same for text."""
    units: list[Literal["iterations", "seconds"]] = []
    since: list[float] = []
    states: list[dict[int, dict[int, TracedLink]]] = []
    late: list[Mapping[int, float]] = []
    stages: list[Mapping[int, TracedStage]] = []
    for number, raw in enumerate(text.splitlines(), 1):
        if not raw.strip():
            continue
        where = f"{name}, line {number}"
        line = _line(raw, where)
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


def _line(raw: str, where: str) -> _Line:
    try:
        data: Any = json.loads(raw)
    except (ValueError, RecursionError):
        raise InputError(f"{where}: is not JSON") from None
    try:
        return _Line.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the line"
        raise InputError(f"{where}: {field}: {one_line(first['msg'])}") from None
