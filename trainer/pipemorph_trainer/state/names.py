"""Names of a stage's values in the whole model: those that they have in its module, as long as no
two stages use the same one.

Checkpoints that are resumed with another number of stages, and layers that move between stages, go
by these names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from pipemorph_trainer.state.tied import Holder

Names = Mapping[int, Sequence[str]]
"""By stage."""


class Clash(NamedTuple):
    """A name that two stages use."""

    name: str
    first: int
    second: int

    def __str__(self) -> str:
        return f"stages {self.first} and {self.second} both have {self.name!r}"


def own_names(modules: Mapping[int, nn.Module], aliases: Mapping[Holder, Holder]) -> Names:
    """The names of what modules save. ``aliases``: tied weights, with their first holder, under
    whose name they count."""
    return {
        stage: [
            name
            for name in sorted(module.state_dict())
            if aliases.get(Holder(name, stage), (name, stage)) == (name, stage)
        ]
        for stage, module in modules.items()
    }


def clash(everyone: Iterable[Names]) -> Clash | None:
    """A name that two stages of a column share; None if there is none. ``everyone``: of its
    ranks."""
    seen: dict[str, int] = {}
    for stage, names in sorted(pair for each in everyone for pair in each.items()):
        for name in names:
            if seen.setdefault(name, stage) != stage:
                return Clash(name, seen[name], stage)
    return None
