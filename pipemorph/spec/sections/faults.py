"""``spec.faults``: faults to inject into the transport."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel

from pipemorph.spec.base import FieldError, Milliseconds, SpecModel

EFFECTS = (
    "delay_ms",
    "delay_forwards",
    "jitter_ms",
    "bandwidth_mbps",
    "sever",
    "slowdown",
    "pause_ms",
)
DEVICE_EFFECTS = ("slowdown", "pause_ms")


class Fault(SpecModel):
    """Entry of a fault trace, injected in the transport and recorded in the report. It affects a
    link, the gradient reduction of a stage, the wire between two pods, or a device.

    A fault of a link, wire or device belongs to the places of its ranks in the first layout, and
    does not move with the ranks.

    Bounds are iterations (``fromIteration`` inclusive, ``toIteration`` exclusive) or seconds since
    training began; exactly one kind of bound.
    """

    link: int | None = Field(default=None, ge=0)
    reduction: int | None = Field(
        default=None,
        ge=0,
        description="Instead of link: stage whose replicas reduce their gradients slowly. A fault "
        "of one replica slows its whole group.",
    )
    between: list[Annotated[int, Field(ge=0)]] | None = Field(
        default=None,
        min_length=2,
        max_length=2,
        description="Instead of link: numbers of two pods; affects all traffic between them, links "
        "and edges of reduction rings. A reduction goes round its ring in chunks of 512 KiB, or "
        "less for small buckets, as in NCCL; each step takes as long as its slowest edge.",
    )
    device: int | None = Field(
        default=None,
        ge=0,
        description="Instead of link: device of the rank that has this number in the first "
        "layout; its ops take slowdown times as long, or it pauses.",
    )
    replica: int = Field(
        default=0,
        ge=0,
        description="Pipeline column of the link or stage: with replicas alone, the replica; else "
        "the index of (replica, shard, context, tensor), of which the last varies fastest.",
    )
    from_iteration: int | None = Field(default=None, ge=0)
    to_iteration: int | None = Field(default=None, ge=1)
    from_seconds: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    to_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    delay_ms: Milliseconds | None = Field(
        default=None,
        description="Delays every message on its queue by this time, or every bucket of gradients.",
    )
    delay_forwards: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="Delays every message of a link by this many times the forward op of its "
        "sender, as measured when the fault begins: the same story on machines of other speeds.",
    )
    jitter_ms: Milliseconds | None = Field(
        default=None,
        description="Also delays every message by a uniformly random part of this time; the steps "
        "of a reduction by half of it.",
    )
    bandwidth_mbps: float | None = Field(
        default=None,
        ge=0.001,
        allow_inf_nan=False,
        description="Limits the link, or the gradients that each rank reduces, to this many "
        "megabits per second.",
    )
    sever: Literal["data", "control", "direct"] | None = Field(
        default=None,
        description="Cuts the engine's data or control connection, or the direct route, once.",
    )
    slowdown: float | None = Field(
        default=None,
        gt=1,
        le=1000,
        description="Factor by which each op on the device takes longer: its rank waits after it. "
        "For emulated stages and stages on the CPU.",
    )
    pause_ms: Milliseconds | None = Field(
        default=None,
        description="Time for which the rank of the device stops, once per iteration, in its first "
        "op.",
    )

    @model_validator(mode="after")
    def _check_effect_and_bounds(self) -> Fault:
        effects = [n for n in EFFECTS if getattr(self, n) is not None]
        if not effects:
            raise FieldError("", f"has no effect; give one of {', '.join(map(to_camel, EFFECTS))}")
        given = sum(
            each is not None for each in (self.link, self.reduction, self.between, self.device)
        )
        if given != 1:
            found = "several" if given else "none"
            raise FieldError(
                "", f"has {found} of link, reduction, between and device; give one of them"
            )
        wrong = [n for n in effects if (n in DEVICE_EFFECTS) != (self.device is not None)]
        if wrong:
            raise FieldError(
                "device" if self.device is not None else to_camel(wrong[0]),
                "is set; device needs slowdown or pauseMs, and no other effect; both need device",
            )
        if self.reduction is not None and self.jitter_ms is not None:
            raise FieldError("jitterMs", "is set; a reduction cannot have jitter, only a link can")
        if self.link is None and self.delay_forwards is not None:
            raise FieldError("delayForwards", "is set; only a link can have it; use delayMs")
        if self.link is None and self.sever is not None:
            raise FieldError(
                "sever",
                f"is {self.sever}, but only a link can be cut; use delayMs or bandwidthMbps",
            )
        if self.between is not None and self.between[0] == self.between[1]:
            raise FieldError("between", f"is pod {self.between[0]} twice; expected two pods")
        by_iteration = self.from_iteration is not None or self.to_iteration is not None
        by_seconds = self.from_seconds is not None or self.to_seconds is not None
        if by_iteration and by_seconds:
            raise FieldError("", "is bounded by iterations and by seconds; use one kind of bound")
        for low, high, end in (
            (self.from_iteration, self.to_iteration, "toIteration"),
            (self.from_seconds, self.to_seconds, "toSeconds"),
        ):
            if low is not None and high is not None and low >= high:
                raise FieldError(end, f"is {high}, which is not after its start, {low}")
        return self
