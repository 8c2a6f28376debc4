"""The part of a model that a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipemorph.errors import InputError


@dataclass(frozen=True)
class Part:
    """The part of a model that a rank holds: the argument of a stage's builder.

    ``split``: by stage, how many layers it holds; empty: they are spread evenly. ``asked``: the
    totals for which :meth:`layers` was called, so that it is known whether a builder cuts the model
    at the layers that it is told.
    """

    stage: int
    stages: int
    split: tuple[int, ...] = ()
    asked: set[int] = field(default_factory=set, compare=False, repr=False)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def layers(self, total: int) -> range:
        """The layers of this part, of ``total`` that are split over the stages in order. While
        none have moved they are split evenly; if that cannot be, the first stages get one more.

        Raises :class:`InputError` if other than ``total`` layers have moved.
        """
        self.asked.add(total)
        if self.split:
            if sum(self.split) != total:
                raise InputError(
                    f"the builder of stage {self.stage} splits {total} layers; the host has spread"
                    f" {sum(self.split)} (spec.parallelism.layers): make the two equal"
                )
            begin = sum(self.split[: self.stage])
            return range(begin, begin + self.split[self.stage])
        each, more = divmod(total, self.stages)
        begin = self.stage * each + min(self.stage, more)
        return range(begin, begin + each + (self.stage < more))


def why_fixed(parts: Sequence[Part] | None, total: int) -> str:
    """Why these parts of a rank cannot have other layers, of ``total``; empty if they can.
    ``parts``: None if its stages were given as modules."""
    if parts is None:
        return (
            "Pipeline was given a stage, and no function that builds it of the layers of a part;"
            " give it one (part.layers)"
        )
    asked = set.union(*(part.asked for part in parts))
    if not asked:
        return "the function that builds a stage does not ask part.layers() which layers it holds"
    if asked != {total}:
        others = ", ".join(map(str, sorted(asked)))
        return (
            f"the function that builds a stage splits {others} layers, and spec.parallelism.layers"
            f" is {total}; make the two equal"
        )
    return ""
