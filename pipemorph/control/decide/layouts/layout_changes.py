"""Changes of a job's layout: when it changes to another one, and the measured gain. Pure; the clock
is an argument.

A change begins a new generation: all ranks leave at one iteration, and the next ones begin with the
new layout, on trial (:mod:`pipemorph.control.restart.layout_transition`). Its outcome is read from
the job's generations, under ``pipemorph run`` as in pods. A change that made iterations slower is
undone, if the remaining iterations pay for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any, get_args

from pipemorph.control.decide.layouts.layer_split import LAYER_TIME_CHANGED as LAYER_CHANGED
from pipemorph.control.decide.layouts.layer_split import LayerSplit, propose_layer_split
from pipemorph.control.decide.layouts.layout_search import (
    EQUAL_WITHIN,
    LateWires,
    LayoutProposal,
    NetworkMeasurements,
    WireDelays,
    format_wires,
    propose_places,
)
from pipemorph.control.history.job_history import FinishedRecord
from pipemorph.control.job_generations import JobGenerations
from pipemorph.errors import one_line
from pipemorph.planning import Route
from pipemorph.protocol import Health, IterationSample, LinkState
from pipemorph.protocol.states import Direction
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.layout import Layout, RankLayout, Wire, may_change_places

CHECK_SECONDS = 1.0
"""Seconds between two checks for another layout."""

ITERATIONS_BEFORE, SETTLING_ITERATIONS = 3, 8
"""Iterations before a change whose median is compared; and after it, in which plans settle."""

Timed = Sequence[FinishedRecord | IterationSample]
"""Finished iterations, by index."""

COMPARED_ITERATIONS = 16
"""Iterations with another layout after which its gain is known."""

REST_FACTOR = 10.0
"""Cool-down after a change, as a multiple of its duration (expected duration if it failed)."""

LATENESS_CHANGED = 0.25
"""Relative change of a wire's lateness after which a decision is made again."""

CONFIRM_SECONDS, CONFIRM_ITERATIONS, CONFIRM_CHECKS = 2.0, 4, 3
"""Seconds, iterations and newest checks in which another split must always seem better. Each check
follows further iterations: op times are medians of some iterations, and those of all stages do not
arrive at once."""

LONGEST_GAP_SECONDS = 10.0
"""Seconds after which a check does not continue the one before."""


class ImbalanceTracker:
    """Consecutive checks in which another split of the layers seemed better, and the same stage was
    the slowest. ``now``: monotonic; ``remaining``: iterations."""

    def __init__(self, slowest: int, now: float, remaining: int) -> None:
        self.slowest, self._since, self._iterations_remaining = slowest, now, remaining
        self._last, self._iterations_remaining_seen = now, remaining + 1
        self._newest_times: deque[tuple[float, ...]] = deque(maxlen=CONFIRM_CHECKS)

    def continues_with(self, slowest: int, now: float) -> bool:
        """True if the same stage is still the slowest, soon enough after the last check."""
        return slowest == self.slowest and now - self._last <= LONGEST_GAP_SECONDS

    def record_stage_times(self, times: tuple[float, ...], now: float, remaining: int) -> bool:
        """Record the times of all stages. Returns True if iterations were finished since the last
        check. Ranks report only changed op times, so equal times may be new."""
        self._last = now
        if remaining >= self._iterations_remaining_seen:
            return False
        self._iterations_remaining_seen = remaining
        self._newest_times.append(times)
        return True

    def confirms_gain(self, gain: float, now: float, remaining: int) -> bool:
        """True if the checks lasted long enough, and ``gain`` exceeds the differences of the
        slowest stage's time between them."""
        if (
            now - self._since < CONFIRM_SECONDS
            or self._iterations_remaining - remaining < CONFIRM_ITERATIONS
        ):
            return False
        took = [times[self.slowest] for times in self._newest_times]
        return len(took) == CONFIRM_CHECKS and gain > max(took) / min(took) - 1


@dataclass
class LayoutChange:
    """Change of the layout. ``outcome``: ``requested``, ``departed``, ``moved``, ``stayed`` or
    ``went back``. ``seconds``: from the departure of the ranks to the end of the next iteration."""

    reason: str
    proposal: LayoutProposal
    layout_before: Layout
    outcome: str = "requested"
    outcome_reason: str = ""
    generation: int | None = None
    iteration: int | None = None
    """First one in the new layout."""
    seconds: float | None = None
    measured_gain: float | None = None
    """Fraction of an iteration that was saved; None: not known yet."""
    undoes_change: bool = False
    """True if this undoes a change that missed its promise."""
    seconds_before: Sequence[float] = ()
    """Seconds of the last iterations before the change."""

    def compare_seconds(self, now: Sequence[float]) -> None:
        """Compute the saving from the seconds of iterations since; empty: not known."""
        if self.seconds_before and now:
            self.measured_gain = round(1 - median(now) / median(self.seconds_before), 4)

    def seconds_since(self, finished: Timed, end: float = inf) -> list[float]:
        """Seconds of iterations with this layout, once plans have settled, before ``end``."""
        first = inf if self.iteration is None else self.iteration + SETTLING_ITERATIONS
        return [each.seconds for each in finished if first <= each.index < end]

    @property
    def moves_layers(self) -> bool:
        """True if layers move between stages; else ranks change places."""
        return self.layout_before.layers != self.proposal.layout.layers

    @property
    def where_text(self) -> str:
        return "with other layers" if self.moves_layers else "at other places"


@dataclass(frozen=True)
class LayoutSearchRequest:
    """Request to search for another layout, which may take :data:`~.layout_search.SEARCH_SECONDS`:
    for :func:`search_layout`, in this process or another one. ``reason``: text for users;
    ``layer_split``: to improve; None: search other places; ``refused_layouts``: they failed."""

    reason: str
    spec: JobSpec
    layout: Layout
    network: NetworkMeasurements
    late_wires: LateWires
    change_cost: float
    layer_split: LayerSplit | None = None
    refused_layouts: frozenset[RankLayout] = frozenset()

    @property
    def unchanged_text(self) -> str:
        """Text that nothing changes, with the reason of the search."""
        what = (
            "ranks stay at their places"
            if self.layer_split is None
            else "layers stay where they are"
        )
        return f"{what}: {self.reason}"


def search_layout(question: LayoutSearchRequest) -> LayoutProposal | None:
    """Search the best other layout; None if none is better."""
    network, late, cost = question.network, question.late_wires, question.change_cost
    if question.layer_split is None:
        spec, layout = question.spec, question.layout
        return propose_places(spec, layout, network, late, cost, without=question.refused_layouts)
    return propose_layer_split(
        question.layer_split, network, late, cost, without=question.refused_layouts
    )


class LayoutChanges:
    """Changes of layout of one job, as read from its ``generations``. ``note``: callback with a
    text for the user; ``clock``: monotonic, seconds."""

    def __init__(
        self,
        spec: JobSpec,
        generations: JobGenerations,
        note: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.spec, self._clock, self._notify_user = spec, clock, note
        self.last_note = ""
        """Newest note for the user."""
        self._generations = generations
        self._seen = generations.attempt, generations.saved.generation
        self._first = Layout.from_parallelism(spec.parallelism)
        self.layout = self._first.apply_rank_layout(generations.layout)
        """Layout of the ranks that run."""
        self._wire_delays = WireDelays(spec.adaptation)
        self._last_judged_places: tuple[tuple[int, ...], Mapping[Wire, float]] | None = None
        """Places and late wires at the last decision."""
        self._imbalance: ImbalanceTracker | None = None
        """Checks in which another split of the layers seems better."""
        self._last_judged_layers: tuple[tuple[int, ...], tuple[float, ...]] | None = None
        """Split, and seconds of a layer by stage, at the last decision on layers."""
        self._usual_wire_time = 0.0
        """Wire time of healthy links, seconds."""
        self.requested_change: LayoutChange | None = None
        """Change that was requested from the ranks, and does not count yet."""
        self._unconfirmed_change: LayoutChange | None = None
        """Change that counts, without a finished iteration since."""
        self._rests_until = 0.0
        """End of the cool-down, by the clock."""
        self._checked_at = -inf
        self.made_changes: list[LayoutChange] = []

    def record_note(self, text: str) -> None:
        """Send a text to the user."""
        self.last_note = one_line(text, 300)
        self._notify_user(self.last_note)

    def is_check_due(self) -> bool:
        """True if another layout should be searched now: once a second, while ranks may leave."""
        now = self._clock()
        wanted = (
            self.spec.adaptation.relayout
            and self.requested_change is None
            and not self.awaits_first_iteration
        )
        if not wanted or now < self._checked_at + CHECK_SECONDS:
            return False
        generations = self._generations
        if generations.layout_before is not None or generations.generation_state.over:
            return False
        self._checked_at = now
        return generations.layout_transition.may_change

    @property
    def _is_resting(self) -> bool:
        return self._clock() < self._rests_until

    # --- decisions ------------------------------------------------------------------------

    def search_for_change(
        self, network: NetworkMeasurements, cost: float, finished: Timed
    ) -> LayoutChange | None:
        """Search for a change that pays, in this process, if measurements have changed since the
        last decision. ``cost``: seconds of a change; ``finished``: as in
        :meth:`find_change_to_undo`."""
        move = self.find_change_to_undo(finished, network.iterations_remaining, cost)
        for question in () if move is not None else self.list_searches(network, cost):
            move = move or self.judge_proposal(question, search_layout(question))
        return move

    def find_change_to_undo(
        self, finished: Timed, remaining: int, cost: float
    ) -> LayoutChange | None:
        """Change that undoes the newest one, if that made iterations slower and the ``remaining``
        ones pay for the way back. ``finished``: newest iterations."""
        move = next(
            (each for each in reversed(self.made_changes) if each.iteration is not None), None
        )
        if move is None or move.measured_gain is not None:
            return None
        now = move.seconds_since(finished)
        if len(now) >= COMPARED_ITERATIONS:
            move.compare_seconds(now)
        if (measured := move.measured_gain) is None:
            return None
        more = "less" if measured >= 0 else "more"
        text = (
            f"{move.where_text} an iteration takes {abs(measured):.0%} {more} time than before,"
            f" {move.proposal.promised_gain:.0%} less promised"
        )
        self.record_note(text)
        if move.generation is not None:
            self._generations.record_measured_gain(move.generation, measured)
        was, least = median(move.seconds_before), self.spec.adaptation.min_gain
        back = LayoutProposal(move.layout_before, median(now), was, cost, remaining, least)
        if move.undoes_change or self.layout != move.proposal.layout or not back.pays_off:
            return None
        return LayoutChange(
            f"{text}; so the change is undone", back, self.layout, undoes_change=True
        )

    def _update_wire_delays(self, network: NetworkMeasurements) -> None:
        """Update the delays of all wires of the job, before a search."""
        self._wire_delays.update_from(self.layout, network)
        well = [link.wire_time for link in network.links if link.health is Health.HEALTHY]
        self._usual_wire_time = median(well) if well else self._usual_wire_time

    def list_searches(
        self, network: NetworkMeasurements, cost: float
    ) -> Iterator[LayoutSearchRequest]:
        """Yield the searches to make now: for other places, then for another split."""
        if self._is_resting:
            return
        if may_change_places(self.layout.mesh):
            self._update_wire_delays(network)
            if (places := self._build_places_search(network, cost)) is not None:
                yield places
        if (layers := self._build_layers_search(network, cost)) is not None:
            yield layers

    @property
    def _refused_layouts(self) -> frozenset[RankLayout]:
        return frozenset(self._generations.layout_transition.refused_layouts)

    def _build_places_search(
        self, network: NetworkMeasurements, cost: float
    ) -> LayoutSearchRequest | None:
        """Request to search other places of the ranks; None: nothing new was measured."""
        late = dict(self._wire_delays.late_seconds)
        if self._wire_delays.lacks_measurements(
            self.layout, network
        ) or not self._late_wires_changed(late):
            return None
        reason = f"late: {format_wires(late)}" if late else "no wire is late any more"
        return LayoutSearchRequest(
            reason,
            self.spec,
            self.layout,
            network,
            late,
            cost,
            refused_layouts=self._refused_layouts,
        )

    def _build_layers_search(
        self, network: NetworkMeasurements, cost: float
    ) -> LayoutSearchRequest | None:
        """Request to search another split of the layers; None: not now."""
        if not self.spec.parallelism.layers or self._generations.layout_transition.fixed_reason:
            return None
        if self.layout.layers and not network.stage_overhead.initial_seconds:
            return None  # The share of the layers in a stage's time is unknown.
        now = self._clock()
        split = LayerSplit(self.spec, self.layout, network.stages, network.stage_overhead)
        if split.best_gain <= max(self.spec.adaptation.min_gain, EQUAL_WITHIN):
            self._imbalance = None
            return None
        slowest = split.stage_seconds.index(max(split.stage_seconds))
        if self._imbalance is None or not self._imbalance.continues_with(slowest, now):
            self._imbalance = ImbalanceTracker(slowest, now, network.iterations_remaining)
        new = self._imbalance.record_stage_times(
            split.stage_seconds, now, network.iterations_remaining
        )
        if not new or not self._imbalance.confirms_gain(
            split.best_gain, now, network.iterations_remaining
        ):
            return None
        if not self._layer_times_changed(split):
            return None
        times = f"{1e3 * split.stage_seconds[slowest]:.1f} ms of a microbatch"
        others = 1e3 * median(t for i, t in enumerate(split.stage_seconds) if i != slowest)
        reason = f"stage {slowest} computes for {times}, the others for {others:.1f} ms"
        if not may_change_places(self.layout.mesh):
            # Not in each check: a large job has many wires.
            self._update_wire_delays(network)
        late = dict(self._wire_delays.late_seconds)
        return LayoutSearchRequest(
            reason, self.spec, self.layout, network, late, cost, split, self._refused_layouts
        )

    def judge_proposal(
        self, question: LayoutSearchRequest, found: LayoutProposal | None
    ) -> LayoutChange | None:
        """Judge the layout that :func:`search_layout` found for a question. Returns the change if
        it pays. Dropped if the layout has changed meanwhile, or ranks are requested to leave."""
        split = question.layer_split
        if question.layout != self.layout or self.requested_change is not None:
            return None
        if split is None:
            self._last_judged_places = self.layout.places, question.late_wires
        else:
            self._last_judged_layers = self.layout.layers, split.layer_seconds
        if found is None:
            what = "places" if split is None else "split"
            self.record_note(f"{question.unchanged_text}; no other {what} would be faster")
            return None
        if split is None:
            moved = len(self.layout.find_moved_ranks(found.layout))
            text = (
                f"{moved} ranks at other places would make an iteration {found.seconds_after:.3f} s"
            )
        else:
            counts = ", ".join(map(str, found.layout.spread_layers(split.total_layers)))
            text = f"with {counts} layers an iteration would take {found.seconds_after:.3f} s"
        text += f" instead of {found.seconds_before:.3f} s"
        if found.pays_off:
            return LayoutChange(f"{question.reason}; {text}", found, self.layout)
        text += f"; that would save {found.saved_seconds:.1f} s and cost {found.change_cost:.1f} s"
        self.record_note(f"{question.unchanged_text}; {text}")
        return None

    def _layer_times_changed(self, split: LayerSplit) -> bool:
        """True if layer times have changed since the last decision on them."""
        if self._last_judged_layers is None or self._last_judged_layers[0] != self.layout.layers:
            return True
        pairs = zip(split.layer_seconds, self._last_judged_layers[1], strict=True)
        return any(abs(now - was) > LAYER_CHANGED * was for now, was in pairs)

    def _late_wires_changed(self, late: LateWires) -> bool:
        """True if places or late wires have changed since the last decision."""
        if self._last_judged_places is None:
            return bool(late)
        places, judged = self._last_judged_places
        if places != self.layout.places or judged.keys() != late.keys():
            return True
        return any(abs(late[wire] - was) > LATENESS_CHANGED * was for wire, was in judged.items())

    def list_late_links(self) -> list[LinkState]:
        """List the links over wires that are known to be late."""
        mesh, late = self.layout.mesh, self._wire_delays.late_seconds
        return [
            LinkState(
                link=link,
                health=Health.SLOW,
                replica=column,
                direction=direction,
                delay=late[wire],
                bases={Route.DIRECT.value: self._usual_wire_time},
            )
            for column in range(mesh.columns)
            for link in range(mesh.stages - 1)
            if (wire := self.layout.find_link_wire(link, column)) in late
            for direction in get_args(Direction)
        ]

    # --- outcome of a change --------------------------------------------------------------

    def record_request(self, move: LayoutChange) -> None:
        """Record that the ranks were requested to leave."""
        self.made_changes.append(move)
        self.requested_change = move
        what = "layers move" if move.moves_layers else "the ranks change places"
        self.record_note(f"{what}: {move.reason}")

    def record_refusal(self, why: str) -> None:
        """Record that ranks refused to leave, and why."""
        move = self.requested_change
        assert move is not None, "the ranks were not requested to leave"
        move.outcome, move.outcome_reason, self.requested_change, self._imbalance = (
            "stayed",
            why,
            None,
            None,
        )
        self._rest_after_failure(move)
        stay = (
            "layers stay where they are" if move.moves_layers else "the ranks stay at their places"
        )
        self.record_note(f"{stay}: {why}")

    def follow_generation(self, finished: Timed) -> bool:
        """Follow the generation that runs, and its layout. ``finished``: newest iterations. Returns
        True if the layout has changed."""
        generations = self._generations
        before, self.layout = self.layout, self._first.apply_rank_layout(generations.layout)
        now, last = (generations.attempt, generations.saved.generation), self._seen
        self._seen = now
        if now != last:
            self._imbalance = None
            self._begin_generation(finished, again=now[0] != last[0])
        elif (move := self.requested_change) is None:
            pass
        elif move.outcome == "departed" and generations.layout_before is None:
            self._confirm_change(move)
        elif move.outcome == "requested" and not generations.layout_transition.requested_layout:
            self.record_refusal(generations.stay_reason or "they were not requested to leave")
        return self.layout != before

    def _begin_generation(self, finished: Timed, *, again: bool) -> None:
        """Follow another generation. ``again``: it is the first of another attempt."""
        move, on_trial = self.requested_change, self._generations.layout_before is not None
        there = move is not None and self.layout == move.proposal.layout and not again
        if again:
            self._last_judged_places = self._last_judged_layers = None
        if move is None:
            if self._unconfirmed_change is not None:
                self._rest_after_failure(self._unconfirmed_change)
        elif there and move.outcome == "requested" and on_trial:
            move.outcome, move.generation = "departed", self._seen[1]
            move.seconds_before = [each.seconds for each in finished[-ITERATIONS_BEFORE:]]
        elif there and not on_trial:
            self._confirm_change(move)
        else:
            self.requested_change = None
            self._rest_after_failure(move)
            move.outcome = "went back" if move.outcome == "departed" else "stayed"
            begun = "they had trained with the new layout" if move.generation else "they had left"
            fixed = self._generations.layout_transition.fixed_reason if move.moves_layers else ""
            move.outcome_reason = fixed or f"ranks failed before {begun}"
        if again:
            self._unconfirmed_change = None

    def _confirm_change(self, move: LayoutChange) -> None:
        """Record that the new layout counts."""
        move.outcome, self.requested_change = "moved", None
        # The network is not yet measured with these places.
        self._unconfirmed_change, self._rests_until = move, inf

    def change_spec(self, spec: JobSpec) -> None:
        """Use another ``adaptation`` of the job."""
        self.spec, self._wire_delays.adaptation = spec, spec.adaptation

    def record_first_iteration(self, iteration: int, seconds: float) -> None:
        """Record new ranks' first finished iteration, ``seconds`` after the others' departure."""
        move, self._unconfirmed_change = self._unconfirmed_change, None
        if move is not None:
            move.iteration, move.seconds = iteration, round(seconds, 3)
            self._rests_until = self._clock() + REST_FACTOR * seconds
            self.record_note(
                f"{move.where_text} from iteration {iteration} on, after {seconds:.2f} s"
            )

    @property
    def awaits_first_iteration(self) -> bool:
        """True if a change counts, and no iteration is known to be finished since."""
        return self._unconfirmed_change is not None

    def _rest_after_failure(self, move: LayoutChange) -> None:
        """Begin the cool-down after a change that failed: the next one would fail likewise."""
        self._rests_until = self._clock() + REST_FACTOR * move.proposal.change_cost


def build_records(moves: LayoutChanges, iterations: Timed) -> list[dict[str, Any]]:
    """Build the changes for ``report.json``, after the last of all ``iterations``."""
    made, layers = moves.made_changes, moves.spec.parallelism.layers
    if moves.requested_change is not None:
        moves.requested_change.outcome, moves.requested_change.outcome_reason = (
            "stayed",
            "the run ended before",
        )
    end = inf
    for move in reversed(made):
        if move.measured_gain is None:
            move.compare_seconds(move.seconds_since(iterations, end))
        end = end if move.iteration is None else move.iteration
    return [_build_record(move, layers) for move in made]


def _build_record(move: LayoutChange, layers: int | None) -> dict[str, Any]:
    """Build one change. ``layers``: number of layers of the model."""
    proposal = move.proposal
    return {
        "reason": move.reason,
        "outcome": move.outcome,
        "why": move.outcome_reason or None,
        "generation": move.generation,
        "iteration": move.iteration,
        "places": list(proposal.layout.places),
        "moved": list(move.layout_before.find_moved_ranks(proposal.layout)),
        "layers": None if layers is None else list(proposal.layout.spread_layers(layers)),
        "layers_before": None if layers is None else list(move.layout_before.spread_layers(layers)),
        "predicted_seconds_before": proposal.seconds_before,
        "predicted_seconds_after": proposal.seconds_after,
        "promised": proposal.promised_gain,
        "measured": move.measured_gain,
        "expected_cost_seconds": proposal.change_cost,
        "seconds": move.seconds,
    }
