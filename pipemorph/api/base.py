"""Base classes of the manifest models: field naming, strictness, errors that span fields."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class FieldError(ValueError):
    """A check across fields failed. ``where``: path of the field relative to the checking model, in
    manifest notation; :mod:`pipemorph.manifest` prepends the model's path."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = where
        self.message = message


class SpecModel(BaseModel):
    """Base of every manifest model: camelCase, rejects unknown fields, no type coercion."""

    model_config = ConfigDict(
        extra="forbid", alias_generator=to_camel, populate_by_name=True, strict=True
    )
