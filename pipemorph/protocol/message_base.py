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


class ProtocolModel(BaseModel):
    """Base of every wire message: immutable, rejects unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def to_json(self) -> bytes:
        """Message as JSON without fields at their default: most samples lack most optional fields,
        and a report has a limit."""
        return self.model_dump_json(exclude_defaults=True).encode()


class ResponseModel(ProtocolModel):
    """Base of answers. The requester may be of an earlier release, so it ignores unknown fields,
    while a host rejects them."""

    model_config = ConfigDict(extra="ignore", frozen=True)
