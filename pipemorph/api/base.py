"""What every manifest model stands on: naming, strictness, errors that span fields."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class FieldError(ValueError):
    """A value refused by a check that spans fields. ``where`` is the path of the field below
    the model that checks, in manifest notation; :mod:`pipemorph.manifest` joins the two."""

    def __init__(self, where: str, message: str) -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = where
        self.message = message


class SpecModel(BaseModel):
    """Base of every manifest model: camelCase, unknown fields refused, no type coercion."""

    model_config = ConfigDict(
        extra="forbid", alias_generator=to_camel, populate_by_name=True, strict=True
    )
