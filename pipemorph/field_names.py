"""Suggestions for misspelt fields of a file that a pydantic model reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import get_args

from pydantic import BaseModel


def suggest_field(root: type[BaseModel], location: Sequence[int | str]) -> str:
    """End of the message for the unknown field at ``location`` of a file that ``root`` describes:
    the most similar known field, or all of them."""
    name = str(location[-1])
    model = _find_model(root, location[:-1])
    known = [field.alias or key for key, field in model.model_fields.items()] if model else []
    folded = {key.lower().replace("_", ""): key for key in known}
    near = get_close_matches(name.lower().replace("_", ""), folded, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {folded[near[0]]}?"
    return f"; known fields: {', '.join(known)}" if known else ""


def _find_model(root: type[BaseModel], location: Sequence[int | str]) -> type[BaseModel] | None:
    """Model at ``location``; None if not found."""
    model: type[BaseModel] | None = root
    for part in location:
        if isinstance(part, int) or model is None:
            continue
        field = next((f for k, f in model.model_fields.items() if part in (k, f.alias)), None)
        model = next(_iterate_models(field.annotation), None) if field is not None else None
    return model


def _iterate_models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _iterate_models(inner)
