"""State of a controller that survives a restart of its host, as JSON.

The job's agent holds it for the next host. It comes back from a pod of the job, so the bounds here
and :mod:`pipemorph.control.adopted_plan` check it as untrusted data.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipemorph.control.decide.situation import Situation
from pipemorph.control.history.job_history import MOST_RECORDS
from pipemorph.errors import InputError
from pipemorph.planning import Plan, StageTimes
from pipemorph.protocol import (
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

MAX_UNPACKED_BYTES = 16 << 20
"""Most bytes of JSON. The largest plan, of 1,048,576 stages × microbatches, takes 3 MB."""
Worth = Annotated[float, Field(ge=-1e12, le=1e12, allow_inf_nan=False)]
Level = Annotated[int, Field(ge=0, le=1000)]


class SnapshotTooLarge(Exception):
    """Raised if a snapshot is larger than an agent holds."""


def pack_snapshot(snapshot: Mapping[str, Any]) -> str:
    """Encode a snapshot. Raises :class:`SnapshotTooLarge`. Takes 40 ms for the largest plans."""
    raw = json.dumps(snapshot, separators=(",", ":")).encode()
    packed = base64.b64encode(zlib.compress(raw)).decode()
    if len(packed) > MAX_SNAPSHOT_BYTES:
        raise SnapshotTooLarge(
            f"the snapshot takes {len(packed)} bytes of at most {MAX_SNAPSHOT_BYTES}"
        )
    return packed


def unpack_snapshot(text: str) -> bytes:
    """Decode a packed snapshot to JSON. Raises ValueError if it is damaged or too large."""
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(base64.b64decode(text, validate=True), MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if inflate.unconsumed_tail:
        raise ValueError(f"it has more than {MAX_UNPACKED_BYTES} bytes unpacked")
    if not inflate.eof or inflate.unused_data:
        raise ValueError("it is cut off, or followed by something else")
    return raw


def round_times(stage: StageTimes) -> StageTimes:
    """Round times to four digits, enough for comparisons and a third as long."""
    times = {
        name: float(f"{value:.4g}") for name, value in stage if isinstance(value, float) and value
    }
    return stage.model_copy(update=times)


DECIDED = ("directive", "wire_times", "delays", "slow")
"""Fields of the newest decision: its plan, and the links that it was made for."""


def drop_fields(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Copy ``data`` without some fields."""
    return {name: value for name, value in data.items() if name not in names}


class Snapshot(BaseModel):
    """Saved state. With it, the next host continues from the plan in force, undoes changes after
    recovery, and has the records."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[4] = 4
    attempt: Count
    plan_version: PlanVersion
    sequence: Annotated[int, Field(ge=0, le=MAX_SEQUENCE)]
    directive: Directive | None = None
    wire_times: list[Seconds] = Field(default_factory=list)
    delays: list[Seconds] = Field(default_factory=list)
    slow: list[bool] = Field(default_factory=list)
    profiled_at: Annotated[int, Field(ge=-1, le=2**53)] | None = None
    """Newest finished iteration at the last decision for op times; None: never."""
    stages: list[StageTimes] = Field(default_factory=list)
    """Op times and limits of that decision; without them the next host would decide again."""
    barrier: bool | None = None
    """True if the plan for healthy links expects stages to wait between iterations."""
    flaps: Level = 0
    slow_directions: list[LinkState] = Field(default_factory=list)
    slow_since: dict[int, WallClock] = Field(default_factory=dict)
    """Time at which the first slow direction of a link was found, by link."""
    records: list[AdaptationRecord] = Field(default_factory=list, max_length=MOST_RECORDS)
    changes_before: Count = 0
    """Number of changes without a record."""
    worth_before: tuple[Worth, Worth] = (0.0, 0.0)
    """Seconds that these have saved, and their error."""
    baseline: PlanMessage | None = None
    """Plan for healthy links, if it is not that of the spec."""
    doubts: dict[int, Level] = Field(default_factory=dict)
    """Number of times that evidence was wrong lately: of links, op times (-1), a barrier (-2)."""
    footprints: list[tuple[Count | None, Seconds | None, Count | None]] = Field(
        default_factory=list
    )
    """Activation bytes of a microbatch, seconds to copy them, and input bytes, by stage."""
    layers: tuple[Count, ...] = ()
    """Layers by stage to which footprints and op times belong; empty: an even split."""
    initial_stage_seconds: tuple[Seconds, ...] = ()
    """Least seconds of a microbatch with the job's initial split, by stage; empty: unknown. They
    cannot be measured with another split."""

    def for_microbatches(self, count: int) -> Snapshot:
        """Drop the plans and the decision for them if they are for another number of microbatches,
        as when the job continues with more or fewer replicas."""
        directive = self.directive.plan if self.directive else None
        if all(plan is None or plan.microbatches == count for plan in (directive, self.baseline)):
            return self
        return Snapshot(**drop_fields(dict(self), *DECIDED, "baseline"))

    @staticmethod
    def parse_snapshot(data: Mapping[str, Any]) -> Snapshot:
        """Parse a snapshot. Raises :class:`InputError`, one line, if it is invalid."""
        try:
            return Snapshot.model_validate(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise InputError(f"the saved state is unusable: {where}: {first['msg']}") from None

    def decode_plans(self, first: Plan) -> tuple[Plan, Plan]:
        """Decode the plan of the newest directive and the plan for healthy links. ``first``: the
        plan of the spec, for one that is not saved. Raises :class:`InputError` if the number of
        stages differs."""
        directive = self.directive.plan if self.directive else None
        found = [saved.to_plan() if saved else first for saved in (directive, self.baseline)]
        stages = first.schedule.stage_count
        if any((p.schedule.stage_count, len(p.routes)) != (stages, stages - 1) for p in found):
            raise InputError("the saved state belongs to a job with another number of stages")
        return found[0], found[1]

    def decode_situation(self, stages: tuple[StageTimes, ...]) -> Situation | None:
        """Situation of the last decision, with the given op times; None if none is saved."""
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
