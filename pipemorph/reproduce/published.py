"""Figures that the paper and the logs of its authors state, read from ``published.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

WAYS = {
    "1f1b": "1F1B",
    "zero-bubble": "zero-bubble",
    "delegated": "zero-bubble, slow links delegated",
    "adapted": "PipeMorph: delegated and adapted",
}
"""Ways to run that the paper compares, by their keys in the file."""


class Spread(NamedTuple):
    """Mean of a figure, with its least and largest value."""

    mean: float
    least: float
    most: float

    def scale(self, factor: float) -> Spread:
        """Multiply all three values."""
        return Spread(self.mean * factor, self.least * factor, self.most * factor)


def make_exact(value: float) -> Spread:
    """Spread of a figure that has one value only."""
    return Spread(value, value, value)


class Model(NamedTuple):
    """Model of the paper, with its parallelism. Op times of each stage and ``undisturbed`` times of
    an iteration by way, milliseconds."""

    name: str
    tensor: int
    replicas: int
    stages: int
    microbatches: int
    forward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    undisturbed: Mapping[str, float]

    @property
    def parallelism(self) -> str:
        """Degrees in words."""
        return f"tensor {self.tensor}, replicas {self.replicas}, stages {self.stages}"


class MeasuredIteration(NamedTuple):
    """Iteration times of a model by way, milliseconds. ``delays``: milliseconds by link."""

    model: Model
    delays: Mapping[int, float]
    times: Mapping[str, Spread]


@cache
def load_published() -> Mapping[str, Any]:
    """Contents of ``published.json``."""
    text = Path(__file__).with_name("published.json").read_text(encoding="utf-8")
    found: Mapping[str, Any] = json.loads(text)
    return found


@cache
def load_model(name: str) -> Model:
    """Model of the paper, such as ``14B``."""
    found = load_published()["models"][name]
    given = {key: value for key, value in found.items() if key in Model._fields}
    return Model(name, **given, undisturbed=found["undisturbed_ms"])


def list_iterations(experiment: str, model: str | None = None) -> Iterator[MeasuredIteration]:
    """Iteration times of an experiment in the authors' logs."""
    for row in load_published()["iterations"]:
        if row["experiment"] == experiment and model in (None, row["model"]):
            yield MeasuredIteration(
                load_model(row["model"]),
                {int(link): float(delay) for link, delay in row["delays"].items()},
                parse_times(row["ms"]),
            )


def parse_times(found: Mapping[str, list[float]]) -> dict[str, Spread]:
    """Spreads by way."""
    return {way: Spread(*values) for way, values in found.items()}
