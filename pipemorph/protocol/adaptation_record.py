"""Records of plan changes and their gains, in report.json and status."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipemorph.planning.ir import Route
from pipemorph.protocol.message_base import Count, PlanVersion, Seconds, WallClock
from pipemorph.protocol.states import PRINTABLE, LinkState

Text = Annotated[str, Field(max_length=32768), PRINTABLE]


class AdaptationRecord(BaseModel):
    """Directive and its effect. Times in seconds, memory in bytes per stage.

    ``…_before``: medians of the old plan under the conditions that caused the change: over the
    iterations from ``detectable_at`` until the new plan was in effect, without ``detectable_at``
    itself unless it is the only one. ``…_after``: medians over the first iterations under the new
    plan with unchanged links, without the very first, which includes the change. None if not
    measured. ``predicted_…``: including the time of iterations outside their ops.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    plan_version: PlanVersion
    kind: Literal["adapt", "return", "revert"]
    """Kind of change. revert: back to the plan before a change that fell short of its promise."""
    detected_at: WallClock
    """Wall clock of the controller, seconds since the Unix epoch."""
    detected_at_iteration: Count
    detectable_at: int
    """Iteration of the first window of those that showed the change without interruption."""
    applied_at_iteration: Count | None = None
    """First iteration under this plan; None before it, or if the plan never took effect."""
    reason: Text
    links: list[LinkState]
    """Links that were slow or unknown when the plan was made."""
    warmup_before: list[int]
    warmup_after: list[int]
    routes: list[Route]
    predicted_seconds_before: float | None
    predicted_seconds_after: float
    promised: float | None = None
    """1 − predicted seconds after / before: the fraction of an iteration that the change saves."""
    measured: float | None = None
    """Fraction of an iteration saved, from measured seconds."""
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
    """Microbatches per iteration whose forward the new plan runs again, per stage."""
    fused_stages: list[int] = Field(default_factory=list)
    """Stages with fused backwards under the new plan."""
    shares: list[Count] = Field(default_factory=list)
    """Microbatches of each replica under the new plan; empty: equal numbers."""
    change_seconds: Seconds | None = None
    """Excess time of the first iteration under this plan over the next ones."""
    saving: Annotated[float, Field(ge=-1e7, le=1e7)] | None = None
    """Predicted saving of an iteration against the initial plan, in seconds, in the present state
    of links and ops; None if unknown, negative if this plan takes more."""
    saved: Annotated[float, Field(ge=-1e12, le=1e12)] = 0.0
    """Sum of ``saving`` over the iterations under this plan."""
    fault_cost: Annotated[float, Field(ge=-1e7, le=1e7)] = 0.0
    """Predicted seconds by which slow links lengthen an iteration under the initial plan."""
    fault_costs: Annotated[float, Field(ge=-1e12, le=1e12)] = 0.0
    """Sum of ``fault_cost`` over the iterations under this plan."""
    saved_until: Count | None = None
    """Newest iteration in these sums."""
