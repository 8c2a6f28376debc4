"""Base class and field constructors of the status models."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

MAX_SLOW_LINKS = 32
MAX_STAGES = 512

Timestamp = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Text = Annotated[str, Field(max_length=32768)]


def number_field(description: str) -> Any:
    """Field of a number from 0, by default 0."""
    return Field(default=0, ge=0, description=description)


def link_name_field() -> Any:
    """Field of a link's name, by default empty."""
    text = "Name of the link for people, such as link 1 (stage 1 to 2)."
    return Field(default="", max_length=128, description=text)


def list_field(items: int, description: str) -> Any:
    """Field of a list with at most ``items`` items, by default empty."""
    return Field(default_factory=list, max_length=items, description=description)


class StatusModel(BaseModel):
    """Base of every status model. Lenient, so that status of older versions stays readable."""

    model_config = ConfigDict(extra="ignore", alias_generator=to_camel, populate_by_name=True)
