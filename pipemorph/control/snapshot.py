"""A controller's state that survives a restart of its host, as JSON.

The job's agent holds it for the next host. So it comes back from a pod of the job: the bounds here
and :mod:`pipemorph.control.handed_in` check it as data that nobody has seen before.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipemorph.control.decide.situation import Situation
from pipemorph.control.record.history import KEPT_RECORDS
from pipemorph.errors import InputError
from pipemorph.planning import Plan, StageTimes
from pipemorph.wire import (
    MAX_SEQUENCE,
    MAX_SNAPSHOT_BYTES,
    AdaptationRecord,
    Count,
    Directive,
    LinkState,
    PlanMessage,
    PlanVersion,
    Seconds,
    WallClock,
)

MAX_UNPACKED = 16 << 20
"""Most bytes of JSON. The largest plan, of 1,048,576 stages × microbatches, takes 3 MB."""
Worth = Annotated[float, Field(ge=-1e12, le=1e12, allow_inf_nan=False)]
Level = Annotated[int, Field(ge=0, le=1000)]


class TooLarge(Exception):
    """The snapshot is larger than an agent holds."""


def pack(snapshot: Mapping[str, Any]) -> str:
    """Encode a snapshot. Raises :class:`TooLarge`. Takes 40 ms for the largest plans."""
    raw = json.dumps(snapshot, separators=(",", ":")).encode()
    packed = base64.b64encode(zlib.compress(raw)).decode()
    if len(packed) > MAX_SNAPSHOT_BYTES:
        raise TooLarge(f"the snapshot takes {len(packed)} bytes of at most {MAX_SNAPSHOT_BYTES}")
    return packed


def unpack(text: str) -> bytes:
    """The JSON of a packed snapshot. Raises ValueError if it is damaged or too large."""
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(base64.b64decode(text, validate=True), MAX_UNPACKED)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if inflate.unconsumed_tail:
        raise ValueError(f"it has more than {MAX_UNPACKED} bytes unpacked")
    if not inflate.eof or inflate.unused_data:
        raise ValueError("it is cut off, or followed by something else")
    return raw


def rounded(stage: StageTimes) -> StageTimes:
    """With times of four digits: far more exact than op times are compared, and a third as long."""
    times = {
        name: float(f"{value:.4g}") for name, value in stage if isinstance(value, float) and value
    }
    return stage.model_copy(update=times)


DECIDED = ("directive", "wire_times", "delays", "slow")
"""The plan of the newest decision in a snapshot, and the links that it was made for."""


def without(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in names}


class Snapshot(BaseModel):
    """The saved state. With it, the next host goes on from the plan in force, undoes changes after
    recovery, and has the records."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[3] = 3
    attempt: Count
    plan_version: PlanVersion
    sequence: Annotated[int, Field(ge=0, le=MAX_SEQUENCE)]
    directive: Directive | None = None
    wire_times: list[Seconds] = Field(default_factory=list)
    delays: list[Seconds] = Field(default_factory=list)
    slow: list[bool] = Field(default_factory=list)
    profiled_at: Annotated[int, Field(ge=-1, le=2**53)] | None = None
    """The newest finished iteration when op times were last decided on; None: never."""
    stages: list[StageTimes] = Field(default_factory=list)
    """Op times and limits of that decision, without which the next host would ask for it again."""
    barrier: bool | None = None
    """Whether the plan for healthy links expects stages to wait between iterations."""
    flaps: Level = 0
    slow_directions: list[LinkState] = Field(default_factory=list)
    slow_since: dict[int, WallClock] = Field(default_factory=dict)
    """Per link with slow directions, when the first of them was found."""
    records: list[AdaptationRecord] = Field(default_factory=list, max_length=KEPT_RECORDS)
    changes_before: Count = 0
    """Number of changes without a record."""
    worth_before: tuple[Worth, Worth] = (0.0, 0.0)
    """What these were worth: seconds, and their error."""
    baseline: PlanMessage | None = None
    """The plan for healthy links, if it is not that of the spec."""
    doubts: dict[int, Level] = Field(default_factory=dict)
    """How often a link, the op times (-1) or what is known of a barrier (-2) were wrong lately."""
    footprints: list[tuple[Count | None, Seconds | None, Count | None]] = Field(
        default_factory=list
    )
    """Per stage: activation bytes of one microbatch, seconds to copy them, and input bytes."""
    layers: tuple[Count, ...] = ()
    """How many layers each stage holds, of which footprints and op times are; empty: the same."""
    beside: tuple[Seconds, ...] = ()
    """By stage, the least seconds of a microbatch with the split that the job began with: what it
    does beside its layers. Nobody can measure that of another split. Empty: not known."""

    def for_microbatches(self, count: int) -> Snapshot:
        """Without plans, and what was decided with them, if these are for other microbatches: then
        the job goes on with more or fewer replicas than before."""
        directive = self.directive.plan if self.directive else None
        if all(plan is None or plan.microbatches == count for plan in (directive, self.baseline)):
            return self
        return Snapshot(**without(dict(self), *DECIDED, "baseline"))

    @staticmethod
    def read(data: Mapping[str, Any]) -> Snapshot:
        """Parse a snapshot. Raises :class:`InputError` with one line if it is invalid."""
        try:
            return Snapshot.model_validate(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise InputError(f"the saved state is unusable: {where}: {first['msg']}") from None

    def plans(self, first: Plan) -> tuple[Plan, Plan]:
        """The plan of the newest directive, and the plan for healthy links; ``first``, the plan of
        the spec, for one that is not saved. Raises :class:`InputError` if the number of stages
        differs."""
        directive = self.directive.plan if self.directive else None
        found = [saved.plan() if saved else first for saved in (directive, self.baseline)]
        stages = first.schedule.stage_count
        if any((p.schedule.stage_count, len(p.routes)) != (stages, stages - 1) for p in found):
            raise InputError("the saved state is of a job with another number of stages")
        return found[0], found[1]

    def judged(self, stages: tuple[StageTimes, ...]) -> Situation | None:
        """The situation of the last decision, with the given op times; None if none is saved."""
        links = len(stages) - 1
        if any(len(row) != links for row in (self.slow, self.wire_times, self.delays)):
            return None
        return Situation(
            stages=stages,
            wire_times=tuple(self.wire_times),
            delays=tuple(self.delays),
            slow=tuple(self.slow),
            unknown=(True,) * links,
        )
