"""Base classes of the manifest models: field naming, strictness, errors that span fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

# An hour exceeds any op or delay; much larger values overflow timers.
Milliseconds = Annotated[float, Field(ge=0, le=3_600_000, allow_inf_nan=False)]


class FieldError(ValueError):
    """Failure of a check across fields. ``where``: path of the field relative to the checking
    model, in manifest notation; :mod:`pipemorph.manifest` prepends the model's path."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = where
        self.message = message


class SpecModel(BaseModel):
    """Base of every manifest model: camelCase, rejects unknown fields, no type coercion."""

    model_config = ConfigDict(
        extra="forbid", alias_generator=to_camel, populate_by_name=True, strict=True
    )
