"""Part of the model in one stage: the argument of the function that builds the stage.

It records whether that function splits layers by it. If so, layers can move between stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipemorph.errors import InputError


@dataclass(frozen=True)
class ModelShard:
    """Part of the model in one stage: the argument of the stage's builder.

    ``split``: number of layers of each stage; empty: evenly split. ``requested_totals``: totals for
    which :meth:`layers` was called; they show whether a builder uses these layers.
    """

    stage: int
    stages: int
    split: tuple[int, ...] = ()
    requested_totals: set[int] = field(default_factory=set, compare=False, repr=False)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def layers(self, total: int) -> range:
        """Return this part's layers, of ``total`` that are split over the stages in order. Until
        layers move they are split evenly; the first stages get the remainder, a layer each.

        Raises :class:`InputError` if the host has split another number of layers.
        """
        self.requested_totals.add(total)
        if self.split:
            if sum(self.split) != total:
                raise InputError(
                    f"the builder of stage {self.stage} splits {total} layers; the host splits"
                    f" {sum(self.split)} (spec.parallelism.layers): make the two equal"
                )
            begin = sum(self.split[: self.stage])
            return range(begin, begin + self.split[self.stage])
        each, more = divmod(total, self.stages)
        begin = self.stage * each + min(self.stage, more)
        return range(begin, begin + each + (self.stage < more))


def find_move_obstacle(parts: Sequence[ModelShard] | None, total: int) -> str:
    """Explain why layers cannot move to or from a rank's stages; empty if they can. ``parts``:
    of the stages; None if these were given as modules. ``total``: number of layers of the model."""
    if parts is None:
        return (
            "Pipeline was given a stage, and no function that builds it from the layers of"
            " part.layers(); give it one"
        )
    totals = set.union(*(part.requested_totals for part in parts))
    if not totals:
        return "the function that builds a stage does not call part.layers() for its layers"
    if totals != {total}:
        others = ", ".join(map(str, sorted(totals)))
        return (
            f"the function that builds a stage splits {others} layers, and spec.parallelism.layers"
            f" is {total}; make the two equal"
        )
    return ""
