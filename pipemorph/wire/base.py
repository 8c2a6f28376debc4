"""Base of all messages, and the bounds of received values."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# Bounds far beyond any job, so that arithmetic on received values cannot overflow.
Seconds = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]
WallClock = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**53 - 1)]
# Bound of received plan versions: far below Count, so that the next version is valid too.
PlanVersion = Annotated[int, Field(ge=0, le=2**31 - 1)]
# A limit or a count of microbatches in a plan: the compiled core takes it as an int.
Microbatches = Annotated[int, Field(ge=1, le=2**31 - 1)]
ObjectName = Annotated[str, Field(min_length=1, max_length=253)]


class WireModel(BaseModel):
    """Base of every wire message: immutable, rejects unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def body(self) -> bytes:
        """As JSON, without fields that have their default: most samples lack most optional ones,
        and a report has a limit."""
        return self.model_dump_json(exclude_defaults=True).encode()


class Answer(WireModel):
    """Base of answers. Whoever asked may be of an earlier release: it ignores what it does not
    know, while a host rejects that."""

    model_config = ConfigDict(extra="ignore", frozen=True)
