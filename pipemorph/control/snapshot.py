"""A controller on record: what outlives its host, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipemorph.control.decide.forecast import Situation
from pipemorph.control.history import AdaptationRecord
from pipemorph.errors import InputError
from pipemorph.planning import Plan, StageTimes
from pipemorph.wire import Directive, PlanMessage


class Snapshot(BaseModel):
    """What outlives the host: enough that a plan version is never given to another plan, that what
    was changed is changed back, and that the records stay."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    attempt: int = Field(ge=0)
    plan_version: int = Field(ge=0)
    sequence: int = Field(ge=0)
    directive: Directive | None = None
    wire_times: list[float] = Field(default_factory=list)
    delays: list[float] = Field(default_factory=list)
    slow: list[bool] = Field(default_factory=list)
    flaps: int = 0
    bases: list[tuple[int, int, str, dict[str, float]]] = Field(default_factory=list)
    slow_series: list[tuple[int, int, str, float]] = Field(default_factory=list)
    """Link, replica, direction and delay of what was slow when this was taken."""
    records: list[AdaptationRecord] = Field(default_factory=list)
    baseline: PlanMessage | None = None
    """The plan for links that are well, where measurements asked for another than the spec's."""
    footprints: list[tuple[int | None, float | None]] = Field(default_factory=list)
    """Per stage: bytes that one microbatch holds, seconds that a copy of them takes."""

    @staticmethod
    def read(data: Mapping[str, Any]) -> Snapshot:
        """Raises :class:`InputError`, one line, if it is none."""
        try:
            return Snapshot.model_validate(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise InputError(f"the saved state is unusable: {where}: {first['msg']}") from None

    def plans(self, first: Plan) -> tuple[Plan, Plan]:
        """The plan of the newest directive and that for links that are well; in place of one that
        is not saved, ``first``, the spec's. Raises :class:`InputError` if one is not for as many
        stages."""
        directive = self.directive.plan if self.directive else None
        found = [saved.plan() if saved else first for saved in (directive, self.baseline)]
        stages = first.schedule.stage_count
        if any((p.schedule.stage_count, len(p.routes)) != (stages, stages - 1) for p in found):
            raise InputError("the saved state is of a job with another number of stages")
        return found[0], found[1]

    def judged(self, stages: tuple[StageTimes, ...]) -> Situation | None:
        """What was judged last, with op times that are not on record; None if nothing was."""
        links = len(stages) - 1
        if not len(self.slow) == len(self.wire_times) == len(self.delays) == links:
            return None
        return Situation(
            stages=stages,
            wire_times=tuple(self.wire_times),
            delays=tuple(self.delays),
            slow=tuple(self.slow),
            unknown=(True,) * links,
        )
