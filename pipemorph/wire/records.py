"""What each change of plan was worth: the records of report.json and status."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipemorph.planning.ir import Route
from pipemorph.wire.base import Count, PlanVersion, Seconds, WallClock
from pipemorph.wire.states import PRINTABLE, LinkState

Text = Annotated[str, Field(max_length=32768), PRINTABLE]


class AdaptationRecord(BaseModel):
    """One directive and its effect. Times in seconds, memory in bytes per stage.

    ``…_before``: medians over the iterations after ``detectable_at`` until the new plan was in
    effect, so the old plan under the conditions that caused the change; over iteration
    ``detectable_at``, in which they began, if there is no other. ``…_after``: medians over
    the first iterations under the new plan while links are as they were, without the very first, in
    which the change is. None if nothing was measured. ``predicted_…``: with what iterations take
    beside their ops.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    plan_version: PlanVersion
    kind: Literal["adapt", "return", "revert"]
    """revert: back to the plan before a change that did not bring its promise."""
    detected_at: WallClock
    """Controller's wall clock, seconds since the Unix epoch."""
    detected_at_iteration: Count
    detectable_at: int
    """Iteration of the first window that showed the change, as all later ones did."""
    applied_at_iteration: Count | None = None
    """First iteration under this plan; None before it, or if the plan never took effect."""
    reason: Text
    links: list[LinkState]
    """Links that were slow, or of which nothing was known, when the plan was made."""
    warmup_before: list[int]
    warmup_after: list[int]
    routes: list[Route]
    predicted_seconds_before: float | None
    predicted_seconds_after: float
    promised: float | None = None
    """1 − predicted seconds after / before: the fraction of an iteration that the change saves."""
    measured: float | None = None
    """The same from measured seconds."""
    iteration_seconds_before: float | None = None
    iteration_seconds_after: float | None = None
    bubble_before: float | None = None
    bubble_after: float | None = None
    peak_memory_before: list[int | None] = Field(default_factory=list)
    peak_memory_after: list[int | None] = Field(default_factory=list)
    device_limits_before: list[int | None] = Field(default_factory=list)
    """Most microbatches with activations on the device, per stage; None: all."""
    device_limits_after: list[int | None] = Field(default_factory=list)
    offloaded: list[int] = Field(default_factory=list)
    """Microbatches per iteration that the new plan offloads, per stage."""
    recomputed: list[int] = Field(default_factory=list)
    """Those whose forward it runs again."""
    fused_stages: list[int] = Field(default_factory=list)
    """Stages with fused backwards under the new plan."""
    change_seconds: Seconds | None = None
    """How much longer the first iteration under this plan took than the next ones."""
    saving: Annotated[float, Field(ge=-1e7, le=1e7)] | None = None
    """Predicted seconds that an iteration takes less under this plan than under the plan of the
    start, in the present state of links and ops; None if unknown, negative if it takes more."""
    saved: Annotated[float, Field(ge=-1e12, le=1e12)] = 0.0
    """The sum of ``saving`` over the iterations under this plan."""
    fault_cost: Annotated[float, Field(ge=-1e7, le=1e7)] = 0.0
    """Predicted seconds by which slow links lengthen an iteration under the plan of the start."""
    fault_costs: Annotated[float, Field(ge=-1e12, le=1e12)] = 0.0
    """The sum of ``fault_cost`` over the iterations under this plan."""
    saved_until: Count | None = None
    """The newest of these iterations."""
