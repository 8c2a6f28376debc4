"""The layout of a job's ranks: which one is in force, which one ranks are asked to leave for, and
whether that counts. Pure.

Ranks take up another layout *on trial*: a failure of any kind goes back to the one before, and the
failed one is not tried again. It counts once rank 0 has said that it has been trained. What is in
force and on trial is in status (:class:`~pipemorph.api.status_recoveries.Recoveries`), so that
another ingest goes on from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipemorph.api.layout import Layout, RankLayout, may_change_places
from pipemorph.api.sections.parallelism import Parallelism
from pipemorph.api.status_recoveries import MAX_REFUSED_KEPT, Recoveries
from pipemorph.errors import InputError
from pipemorph.exits import TRIAL_ITERATIONS
from pipemorph.wire import PodReport


class Layouts:
    """The layouts of one job, whose ranks are cut as ``cut``; None: theirs stays. ``move``: whether
    generations may have different ones, as the pods of this attempt were told. ``refused``,
    ``fixed``: as of this, by what is in status."""

    def __init__(
        self,
        cut: Parallelism | None,
        *,
        move: bool,
        refused: Iterable[RankLayout] = (),
        fixed: str = "",
    ) -> None:
        if cut is not None and (cut.min_replicas is not None or cut.stages_per_rank > 1):
            cut = None
        self._first = None if cut is None else Layout.of(cut)
        self._layers = None if cut is None else cut.layers
        self._places = cut is not None and may_change_places(cut.mesh)
        self._move = move
        self.refused = set(refused)
        """Layouts with which ranks have failed, with all their numbers."""
        self.fixed = fixed
        """Why the parts of the model cannot change, as ranks say; empty if they may."""
        self.begin_generation()

    def begin_generation(self) -> None:
        self.asked = RankLayout()
        """The layout that the ranks that run are to leave for, with all its numbers."""
        self.promised: float | None = None
        """Part of an iteration that this is expected to save; None: that is not known here."""
        self.undoes = False
        """Whether ranks leave since the layout in force has not brought what was promised."""
        self.left = False
        """Whether they have left, so that none of them has failed."""
        self.reached = 0
        """The most iterations that one of them has finished, as launchers say when they are gone;
        of ranks that have left, those of all."""
        self.began = 0
        """Those of them that the ranks began with; 0: no launcher has said so."""

    @property
    def possible(self) -> bool:
        """Whether the layout of such a job can change at all."""
        return self._first is not None and (self._places or self._layers is not None)

    @property
    def move(self) -> bool:
        """Whether generations may have different layouts."""
        return self.possible and self._move

    def begin_attempt(self, *, move: bool) -> None:
        """``move``: as of this."""
        self._move = move

    def whole(self, layout: RankLayout) -> RankLayout:
        """A layout with all its numbers."""
        if self._first is None:
            return layout
        return self._first.changed(layout).whole(self._layers)

    def told(self, layout: RankLayout) -> RankLayout:
        """A layout without the numbers of the beginning."""
        return layout if self._first is None else self._first.changed(layout).told

    def fits(self, layout: RankLayout) -> bool:
        """Whether this is a layout of the job: layers make up the model, and each place has a
        rank."""
        if layout.layers and self._layers is None:
            return False
        try:
            whole = self.whole(layout)
        except InputError:
            return False
        return self._first is not None and sum(whole.layers) == (self._layers or 0)

    def allows(self, layout: RankLayout, now: RankLayout) -> bool:
        """Whether ranks with the layout ``now`` may be asked to leave for another one. Places and
        layers change one after the other."""
        if not self.move or not self.fits(layout):
            return False
        wanted, present = self.whole(layout), self.whole(now)
        places, layers = wanted.places != present.places, wanted.layers != present.layers
        if places == layers or wanted in self.refused:
            return False
        return self._places if places else not self.fixed

    def ask(self, layout: RankLayout, promised: float | None, *, undoes: bool) -> None:
        self.asked, self.promised, self.undoes = self.whole(layout), promised, undoes

    def difference(self, now: RankLayout, then: RankLayout) -> dict[str, Any]:
        """``layers`` and ``places`` of a layout, with all numbers, as far as they are others than
        now."""
        was, will = self.whole(now), self.whole(then)
        return {
            "layers": list(will.layers) if will.layers != was.layers else [],
            "places": list(will.places) if will.places != was.places else [],
        }

    def cause(self, now: RankLayout) -> str:
        """Why ranks that have left for the layout that they were asked for did so."""
        was, will = self.whole(now), self.asked
        if was.layers != will.layers:
            counts, others = (", ".join(map(str, each.layers)) for each in (was, will))
            text = f"layers move between stages: from layers {counts} to layers {others}"
        else:
            pairs = enumerate(zip(was.places, will.places, strict=True))
            moved = ", ".join(str(rank) for rank, (at, to) in pairs if at != to)
            text = f"ranks {moved} change places"
        return f"{text}, since the last change made iterations slower" if self.undoes else text

    def gone(self, report: PodReport) -> None:
        """Take what a launcher says of the ranks of this generation that are gone."""
        self.reached = max(self.reached, report.reached)
        self.began = max(self.began, report.began)
        if report.left_for is None:
            return
        self.left = True
        # Another ingest may have asked them.
        if report.left_for and not self.asked and self.fits(report.left_for):
            self.asked = self.whole(report.left_for)

    # --- what is in status --------------------------------------------------------------------

    def taken_up(self, saved: Recoveries) -> Recoveries:
        """Status once ranks have left: they go on with the layout that they were asked to leave
        for, on trial."""
        if not self.asked:
            return saved
        if self.undoes:
            saved = self.refuse(saved)
        return saved.with_layout(self.told(self.asked), saved.layout)

    def refuse(self, saved: Recoveries) -> Recoveries:
        """Status in which the layout in force is not tried again."""
        failed = self.whole(saved.layout)
        self.refused.add(failed)
        known = [each for each in saved.layouts_refused if each != failed]
        kept = [*known, failed][-MAX_REFUSED_KEPT:]
        return saved.model_copy(update={"layouts_refused": kept})

    def began_at(self, saved: Recoveries) -> int | None:
        """The first iteration with the layout that is on trial; None: none is, or it is not known
        here. Where another ingest has begun this generation, ranks that are gone have said so."""
        if saved.layout_before is None:
            return None
        for last in saved.last[-1:]:
            if (last.attempt, last.generation) == (saved.attempt, saved.generation):
                return last.iterations_done
        return self.began or None

    def have_counted(self, saved: Recoveries) -> bool:
        """Whether ranks may have given up their copies of before, since rank 0 had said that the
        layout on trial counts."""
        at = self.began_at(saved)
        return at is not None and self.reached > at + TRIAL_ITERATIONS


def settled(saved: Recoveries) -> Recoveries:
    """Status once the layout counts."""
    return saved.with_layout(saved.layout, None) if saved.layout_before is not None else saved


def brought(saved: Recoveries, generation: int, measured: float) -> Recoveries:
    """Status once it is known what the layout of a generation has saved, as part of an
    iteration."""
    which = saved.attempt, generation
    last = [
        each.model_copy(update={"measured": measured})
        if (each.attempt, each.generation) == which
        else each
        for each in saved.last
    ]
    return saved.model_copy(update={"last": last})
