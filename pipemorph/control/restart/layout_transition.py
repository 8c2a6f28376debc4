"""Layout of a job's ranks: the one in force, the one that ranks are requested to leave for, and its
trial. Pure.

Ranks adopt another layout *on trial*: any failure returns to the one before, and the failed one is
not tried again. It counts once rank 0 reports that it has trained with it. Status
(:class:`~pipemorph.spec.status_recoveries.Recoveries`) holds the layouts in force and on trial, so
that another ingest continues from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipemorph.errors import InputError
from pipemorph.exits import TRIAL_ITERATIONS
from pipemorph.protocol import PodReport
from pipemorph.spec.layout import Layout, RankLayout, may_change_places
from pipemorph.spec.sections.parallelism import Parallelism
from pipemorph.spec.status_recoveries import MAX_REFUSED_KEPT, Recoveries


class LayoutTransition:
    """Layouts of one job. ``cut``: its parallelism; None: its layout never changes. ``move``: True
    if generations may have different layouts, as the pods of this attempt read at their start.
    ``refused``, ``fixed``: values of these attributes in status."""

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
        self._initial_layout = None if cut is None else Layout.from_parallelism(cut)
        self._model_layers = None if cut is None else cut.layers
        self._places_may_change = cut is not None and may_change_places(cut.mesh)
        self._may_change = move
        self.refused_layouts = set(refused)
        """Layouts with which ranks have failed, with all their numbers."""
        self.fixed_reason = fixed
        """Reason of ranks why layers cannot move; empty if they can."""
        self.begin_generation()

    def begin_generation(self) -> None:
        """Forget the request of the generation before."""
        self.requested_layout = RankLayout()
        """Layout that the ranks are requested to leave for, with all numbers."""
        self.promised_gain: float | None = None
        """Expected saving, as a fraction of an iteration; None: unknown."""
        self.undoes_change = False
        """True if ranks leave because the layout in force missed its promise."""
        self.ranks_departed = False
        """True if ranks have departed on request, so that none of them has failed."""
        self.iterations_reached = 0
        """Most iterations that a rank has finished, from launchers whose ranks are gone; ranks that
        leave on request have all finished as many."""
        self.iterations_at_begin = 0
        """Number of iterations that were finished when the ranks began; 0: unknown."""

    @property
    def is_possible(self) -> bool:
        """True if the layout of such a job can change at all."""
        return self._initial_layout is not None and (
            self._places_may_change or self._model_layers is not None
        )

    @property
    def may_change(self) -> bool:
        """True if generations may have different layouts."""
        return self.is_possible and self._may_change

    def begin_attempt(self, *, move: bool) -> None:
        """Begin an attempt. ``move``: True if its generations may have different layouts."""
        self._may_change = move

    def with_all_numbers(self, layout: RankLayout) -> RankLayout:
        """Complete a layout with the numbers of the initial one."""
        if self._initial_layout is None:
            return layout
        return self._initial_layout.apply_rank_layout(layout).to_explicit_layout(self._model_layers)

    def without_initial_numbers(self, layout: RankLayout) -> RankLayout:
        """Strip a layout of the numbers that equal the initial ones."""
        return (
            layout
            if self._initial_layout is None
            else self._initial_layout.apply_rank_layout(layout).rank_layout
        )

    def fits_job(self, layout: RankLayout) -> bool:
        """True if the layers add up to the model, and each place has a rank."""
        if layout.layers and self._model_layers is None:
            return False
        try:
            whole = self.with_all_numbers(layout)
        except InputError:
            return False
        return self._initial_layout is not None and sum(whole.layers) == (self._model_layers or 0)

    def allows_change(self, layout: RankLayout, now: RankLayout) -> bool:
        """True if ranks with the layout ``now`` may be requested to leave for ``layout``. One
        change is of places or of layers, not both."""
        if not self.may_change or not self.fits_job(layout):
            return False
        wanted, present = self.with_all_numbers(layout), self.with_all_numbers(now)
        places, layers = wanted.places != present.places, wanted.layers != present.layers
        if places == layers or wanted in self.refused_layouts:
            return False
        return self._places_may_change if places else not self.fixed_reason

    def request_layout(self, layout: RankLayout, promised: float | None, *, undoes: bool) -> None:
        """Record the request to leave for ``layout``."""
        self.requested_layout, self.promised_gain, self.undoes_change = (
            self.with_all_numbers(layout),
            promised,
            undoes,
        )

    def list_differences(self, now: RankLayout, then: RankLayout) -> dict[str, Any]:
        """Fields ``layers`` and ``places`` of the layout ``then``, with all numbers; empty if equal
        to those of ``now``."""
        was, will = self.with_all_numbers(now), self.with_all_numbers(then)
        return {
            "layers": list(will.layers) if will.layers != was.layers else [],
            "places": list(will.places) if will.places != was.places else [],
        }

    def describe_change(self, now: RankLayout) -> str:
        """Text for the change to the layout that ranks have left for."""
        was, will = self.with_all_numbers(now), self.requested_layout
        if was.layers != will.layers:
            counts, others = (", ".join(map(str, each.layers)) for each in (was, will))
            text = f"layers move between stages: from layers {counts} to layers {others}"
        else:
            pairs = enumerate(zip(was.places, will.places, strict=True))
            moved = ", ".join(str(rank) for rank, (at, to) in pairs if at != to)
            text = f"ranks {moved} change places"
        return (
            f"{text}, since the last change made iterations slower" if self.undoes_change else text
        )

    def record_departed_ranks(self, report: PodReport) -> None:
        """Record a launcher's report on ranks of this generation that are gone."""
        self.iterations_reached = max(self.iterations_reached, report.reached)
        self.iterations_at_begin = max(self.iterations_at_begin, report.began)
        if report.left_for is None:
            return
        self.ranks_departed = True
        # Another ingest may have requested it.
        if report.left_for and not self.requested_layout and self.fits_job(report.left_for):
            self.requested_layout = self.with_all_numbers(report.left_for)

    # --- recoveries in status -----------------------------------------------------------------

    def put_on_trial(self, saved: Recoveries) -> Recoveries:
        """Status once ranks have left: they continue with the requested layout, on trial."""
        if not self.requested_layout:
            return saved
        if self.undoes_change:
            saved = self.refuse_current(saved)
        return saved.with_layout(self.without_initial_numbers(self.requested_layout), saved.layout)

    def refuse_current(self, saved: Recoveries) -> Recoveries:
        """Status in which the layout in force is not tried again."""
        failed = self.with_all_numbers(saved.layout)
        self.refused_layouts.add(failed)
        known = [each for each in saved.layouts_refused if each != failed]
        refused = [*known, failed][-MAX_REFUSED_KEPT:]
        return saved.model_copy(update={"layouts_refused": refused})

    def find_trial_begin(self, saved: Recoveries) -> int | None:
        """First iteration with the layout on trial; None: no trial, or unknown. If another ingest
        began this generation, it is known from ranks that are gone."""
        if saved.layout_before is None:
            return None
        for last in saved.last[-1:]:
            if (last.attempt, last.generation) == (saved.attempt, saved.generation):
                return last.iterations_done
        return self.iterations_at_begin or None

    def may_have_counted(self, saved: Recoveries) -> bool:
        """True if the layout on trial may already count, so that ranks may have dropped the state
        of the layout before."""
        at = self.find_trial_begin(saved)
        return at is not None and self.iterations_reached > at + TRIAL_ITERATIONS


def confirm_layout(saved: Recoveries) -> Recoveries:
    """Status once the layout on trial counts."""
    return saved.with_layout(saved.layout, None) if saved.layout_before is not None else saved


def with_measured_gain(saved: Recoveries, generation: int, measured: float) -> Recoveries:
    """Status with the measured saving of a generation's layout, as a fraction of an iteration."""
    which = saved.attempt, generation
    last = [
        each.model_copy(update={"measured": measured})
        if (each.attempt, each.generation) == which
        else each
        for each in saved.last
    ]
    return saved.model_copy(update={"last": last})
