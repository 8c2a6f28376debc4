"""Names of a stage's values in the whole model: their names in the module of the stage, as long as
no two stages use the same one.

They identify values when a checkpoint is resumed with another number of stages, and when layers
move between stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from pipemorph_trainer.sync.tied_weights import Holder

NamesByStage = Mapping[int, Sequence[str]]
"""Names of values, by stage."""


class NameClash(NamedTuple):
    """Name that two stages use."""

    name: str
    first: int
    second: int

    def __str__(self) -> str:
        return f"stages {self.first} and {self.second} both have {self.name!r}"


def list_own_names(
    modules: Mapping[int, nn.Module], aliases: Mapping[Holder, Holder]
) -> NamesByStage:
    """List the names of the values that modules save. ``aliases``: tied weights, with the first
    holder, under whose name they count."""
    return {
        stage: [
            name
            for name in sorted(module.state_dict())
            if aliases.get(Holder(name, stage), (name, stage)) == (name, stage)
        ]
        for stage, module in modules.items()
    }


def find_name_clash(everyone: Iterable[NamesByStage]) -> NameClash | None:
    """Find a name that two stages of a column share; None if there is none. ``everyone``: names of
    each rank of the column."""
    seen: dict[str, int] = {}
    for stage, names in sorted(pair for each in everyone for pair in each.items()):
        for name in names:
            if seen.setdefault(name, stage) != stage:
                return NameClash(name, seen[name], stage)
    return None
