"""A controller's state that survives a restart of its host, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pipemorph.control.decide.forecast import Situation
from pipemorph.control.decide.replica_links import ReplicaLinks
from pipemorph.errors import InputError
from pipemorph.planning import Plan, StageTimes
from pipemorph.wire import AdaptationRecord, Directive, PlanMessage, SlowDirection


def rounded(stage: StageTimes) -> StageTimes:
    """With times of four digits: far more exact than op times are compared, and a third as long."""
    times = {
        name: float(f"{value:.4g}") for name, value in stage if isinstance(value, float) and value
    }
    return stage.model_copy(update=times)


DECIDED = ("directive", "wire_times", "delays", "slow", "own_links")
"""The plan of the newest decision in a snapshot, and the links that it was made for."""


def without(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in names}


class OwnLinks(BaseModel):
    """The links of some replicas at the last decision."""

    model_config = ConfigDict(extra="forbid")

    replicas: list[int] = Field(min_length=1)
    wire_times: list[float]
    delays: list[float]
    slow: list[bool]


class Snapshot(BaseModel):
    """The saved state. With it, a plan version never names two plans, changes are undone after
    recovery, and the records are kept."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    attempt: int = Field(ge=0)
    plan_version: int = Field(ge=0)
    sequence: int = Field(ge=0)
    directive: Directive | None = None
    wire_times: list[float] = Field(default_factory=list)
    delays: list[float] = Field(default_factory=list)
    slow: list[bool] = Field(default_factory=list)
    own_links: list[OwnLinks] = Field(default_factory=list)
    """Of every replica, where some links are slow; the three above are the worst of each link."""
    profiled_at: int | None = None
    """The newest finished iteration when op times were last decided on; None: never."""
    stages: list[StageTimes] = Field(default_factory=list)
    """Op times and limits of that decision, without which the next host would ask for it again."""
    barrier: bool | None = None
    """Whether the plan for healthy links expects stages to wait between iterations."""
    flaps: int = 0
    slow_directions: list[SlowDirection] = Field(default_factory=list)
    slow_since: dict[int, float] = Field(default_factory=dict)
    """Per link with slow directions, when the first of them was found."""
    records: list[AdaptationRecord] = Field(default_factory=list)
    worth_before: tuple[float, float] = (0.0, 0.0)
    """What changes were worth whose records are not kept any more: seconds, and their error."""
    baseline: PlanMessage | None = None
    """The plan for healthy links, if it is not that of the spec."""
    doubts: dict[int, int] = Field(default_factory=dict)
    """How often a link, the op times (-1) or what is known of a barrier (-2) were wrong lately."""
    footprints: list[tuple[int | None, float | None, int | None]] = Field(default_factory=list)
    """Per stage: activation bytes of one microbatch, seconds to copy them, and input bytes."""
    layers: tuple[int, ...] = ()
    """How many layers each stage holds, of which footprints and op times are; empty: the same."""
    beside: tuple[float, ...] = ()
    """By stage, the least seconds of a microbatch with the split that the job began with: what it
    does beside its layers. Nobody can measure that of another split. Empty: not known."""

    @model_validator(mode="before")
    @classmethod
    def _from_series(cls, data: Any) -> Any:
        """Earlier versions saved the bases of all directions."""
        if not isinstance(data, dict) or "bases" not in data:
            return data
        kept = {key: value for key, value in data.items() if key not in ("bases", "slow_series")}
        names = ("link", "column", "direction")
        try:
            bases = {(*key,): known for *key, known in data["bases"]}
            kept["slow_directions"] = [
                dict(zip(names, key, strict=True)) | {"delay": delay, "bases": bases[(*key,)]}
                for *key, delay in data.get("slow_series", ())
            ]
        except (TypeError, KeyError) as error:
            raise ValueError(f"bases or slow_series: {error}") from None
        return kept

    @field_validator("footprints", mode="before")
    @classmethod
    def _without_inputs(cls, value: Any) -> Any:
        """Earlier versions saved no input bytes."""
        if not isinstance(value, list):
            return value
        return [[*each, None] if len(each) == 2 else each for each in value]

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
        each = (plan for saved in found for plan in saved.each)
        if any((p.schedule.stage_count, len(p.routes)) != (stages, stages - 1) for p in each):
            raise InputError("the saved state is of a job with another number of stages")
        return found[0], found[1]

    def judged(self, stages: tuple[StageTimes, ...]) -> Situation | None:
        """The situation of the last decision, with the given op times; None if none is saved."""
        links = len(stages) - 1
        rows: list[list[float] | list[bool]] = [self.slow, self.wire_times, self.delays]
        for each in self.own_links:
            rows += [each.slow, each.wire_times, each.delays]
        if any(len(row) != links for row in rows):
            return None
        own = (
            ReplicaLinks(
                replicas=tuple(row.replicas),
                wire_times=tuple(row.wire_times),
                delays=tuple(row.delays),
                slow=tuple(row.slow),
                unknown=(True,) * links,
                transfers=(0.0,) * links,
            )
            for row in self.own_links
        )
        return Situation(
            own=tuple(own),
            stages=stages,
            wire_times=tuple(self.wire_times),
            delays=tuple(self.delays),
            slow=tuple(self.slow),
            unknown=(True,) * links,
        )
