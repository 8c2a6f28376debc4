"""How many layers each stage of a job holds: what ranks are asked to leave for, and whether that
counts.

Pure. Ranks take up other layers *on trial*: a failure goes back to those of before, until rank 0
has said that they have been trained. What is in force, and what was before,
:class:`~pipemorph.control.generations.Generations` keeps in status.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipemorph.api.sections.parallelism import Parallelism
from pipemorph.exits import TRIAL_ITERATIONS
from pipemorph.wire import PodReport

Split = tuple[int, ...]
"""By stage, how many layers it holds; empty: evenly many."""


def named(layers: Sequence[int]) -> str:
    """``layers 4, 2``"""
    return f"layers {', '.join(map(str, layers))}"


class Splits:
    """Of one job, whose ranks are cut as ``cut``; None: its layers stay. ``move``: whether
    generations may have different layers, as the pods of this attempt were told. ``refused``,
    ``fixed``: as of this, by what is in status."""

    def __init__(
        self,
        cut: Parallelism | None,
        *,
        move: bool,
        refused: Iterable[Sequence[int]] = (),
        fixed: str = "",
    ) -> None:
        stays = cut is None or cut.layers is None or cut.min_replicas is not None
        self._cut = None if stays else cut
        self._move = move
        self.refused = {tuple(each) for each in refused}
        """Those with which ranks have failed, with a number for every stage."""
        self.fixed = fixed
        """Why the parts of the model cannot change, as ranks say; empty if they may."""
        self.begin_generation()

    def begin_generation(self) -> None:
        self.asked: Split = ()
        """What the ranks that run are to leave for, with a number for every stage."""
        self.promised: float | None = None
        """Part of an iteration that this is expected to save; None: that is not known here."""
        self.left = False
        """Whether they have left, so that none of them has failed."""
        self.reached = 0
        """The most iterations that one of them has finished, as launchers say when they are gone;
        of ranks that have left, those of all."""
        self.began = 0
        """Those of them that the ranks began with; 0: nobody has said so."""

    @property
    def possible(self) -> bool:
        """Whether the layers of such a job can move at all."""
        return self._cut is not None

    @property
    def move(self) -> bool:
        """Whether generations may have different layers."""
        return self.possible and self._move

    def begin_attempt(self, *, move: bool) -> None:
        """``move``: as of this."""
        self._move = move

    def fits(self, layers: Sequence[int]) -> bool:
        """Whether these are numbers of layers of all stages, which make up the model."""
        cut = self._cut
        if cut is None or len(layers) != cut.stages:
            return False
        return min(layers) > 0 and sum(layers) == cut.layers

    def spread(self, split: Split) -> Split:
        """With a number for every stage."""
        if self._cut is None or self._cut.layers is None:
            return split
        return split or (self._cut.layers // self._cut.stages,) * self._cut.stages

    def allows(self, layers: Sequence[int], now: Split) -> bool:
        """Whether ranks with ``now`` may be asked to leave for ``layers``."""
        wanted = tuple(layers)
        known = self.fixed or wanted in self.refused or wanted == self.spread(now)
        return self.move and self.fits(wanted) and not known

    def gone(self, report: PodReport) -> None:
        """Take what a launcher says of the ranks of this generation that are gone."""
        self.reached = max(self.reached, report.reached)
        self.began = max(self.began, report.began)
        if report.left_for is None:
            return
        self.left = True
        # Another ingest may have asked them.
        if not self.asked and self.fits(report.left_for):
            self.asked = report.left_for

    def have_counted(self, left_at: int) -> bool:
        """Whether ranks may have given up their copies of the parts before, since rank 0 had said
        that the new ones count. ``left_at``: the first iteration with these."""
        return self.reached > left_at + TRIAL_ITERATIONS


def split_of(layers: Sequence[int]) -> Split:
    """As what is in force is written: evenly many are not named."""
    return () if len(set(layers)) <= 1 else tuple(layers)
