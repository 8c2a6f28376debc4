"""The layout of a job's ranks: when it changes to another one, and what that has brought. Pure,
with a clock that is given.

A change is a change of generation: all ranks leave at one iteration, and those that follow begin
with the new layout, on trial (:mod:`pipemorph.control.pods.layouts`). What has become of it is read
from the job's generations, under ``pipemorph run`` as in pods. A change that made iterations slower
is undone, if the iterations left pay for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Any, get_args

from pipemorph.api.layout import Layout, RankLayout, Wire, may_change_places
from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.layouts.layers import CHANGED as LAYER_CHANGED
from pipemorph.control.decide.layouts.layers import Split, propose_layers
from pipemorph.control.decide.layouts.relayout import (
    SAME,
    Late,
    Network,
    Proposal,
    Wires,
    named,
    propose,
)
from pipemorph.control.generations import Generations
from pipemorph.control.record.history import Finished
from pipemorph.errors import one_line
from pipemorph.planning import Route
from pipemorph.wire import Health, IterationSample, LinkState
from pipemorph.wire.states import Direction

PLACES_SECONDS = 1.0
"""Time from one look at the network, for another layout of the ranks, to the next."""

BEFORE, SETTLES = 3, 8
"""Iterations before a change whose median is compared; after it, those in which plans settle."""

Timed = Sequence[Finished | IterationSample]
"""Finished iterations, by index."""

COMPARED = 16
"""Iterations with another layout after which it is known what it has brought."""

REST = 10.0
"""After a change ranks stay for so many times the seconds that it took, whatever is measured. After
one that failed, for so many times those that it was expected to take."""

CHANGED = 0.25
"""A decision is made again when the lateness of a wire has changed by more than this part of it."""

CONFIRM_SECONDS, CONFIRM_ITERATIONS, CONFIRM_LOOKS = 2.0, 4, 3
"""For which another split of the layers must seem better in every look, and the newest looks after
further iterations whose times are compared: op times are medians of some iterations, and those of
all stages do not arrive at once."""

PAUSE = 10.0
"""Seconds after which a look does not go on from the one before."""


class Uneven:
    """The looks in which another split of the layers seemed better, one after another, and the same
    stage was the slowest. ``now``: monotonic; ``left``: iterations."""

    def __init__(self, slowest: int, now: float, left: int) -> None:
        self.slowest, self._since, self._left = slowest, now, left
        self._last, self._seen = now, left + 1
        self._looks: deque[tuple[float, ...]] = deque(maxlen=CONFIRM_LOOKS)

    def goes_on(self, slowest: int, now: float) -> bool:
        return slowest == self.slowest and now - self._last <= PAUSE

    def see(self, times: tuple[float, ...], now: float, left: int) -> bool:
        """Take the times of all stages. Returns whether iterations were finished since the last
        look. Ranks whose op times stay the same do not report them again."""
        self._last = now
        if left >= self._seen:
            return False
        self._seen = left
        self._looks.append(times)
        return True

    def confirms(self, gain: float, now: float, left: int) -> bool:
        """Whether it was so for long enough, and ``gain`` is more than the slowest stage's time
        differs between looks."""
        if now - self._since < CONFIRM_SECONDS or self._left - left < CONFIRM_ITERATIONS:
            return False
        took = [times[self.slowest] for times in self._looks]
        return len(took) == CONFIRM_LOOKS and gain > max(took) / min(took) - 1


@dataclass
class Move:
    """One change of the layout. ``outcome``: ``asked``, ``left``, ``moved``, ``stayed`` or ``went
    back``. ``seconds``: from when the ranks left to the end of the next iteration."""

    reason: str
    proposal: Proposal
    before: Layout
    outcome: str = "asked"
    why: str = ""
    generation: int | None = None
    iteration: int | None = None
    """The first one in the new layout."""
    seconds: float | None = None
    measured: float | None = None
    """Part of an iteration that it has saved; None: not known yet."""
    undoes: bool = False
    """Whether it goes back from a change that has not brought what it promised."""
    was: Sequence[float] = ()
    """Seconds of the last iterations before it."""

    def compare(self, now: Sequence[float]) -> None:
        """Take what it has saved, by the seconds of iterations since; none: not known."""
        if self.was and now:
            self.measured = round(1 - median(now) / median(self.was), 4)

    def since(self, finished: Timed, end: float = inf) -> list[float]:
        """Seconds of the iterations with this layout once plans have settled. ``end``: the first
        one in the next layout."""
        first = inf if self.iteration is None else self.iteration + SETTLES
        return [each.seconds for each in finished if first <= each.index < end]

    @property
    def of_layers(self) -> bool:
        """Whether layers move between stages; else ranks change places."""
        return self.before.layers != self.proposal.layout.layers

    @property
    def where(self) -> str:
        return "with other layers" if self.of_layers else "at other places"


@dataclass(frozen=True)
class Question:
    """A search for another layout than the present one, which may take
    :data:`~.relayout.SEARCH_SECONDS`: for :func:`search`, in this process or another one.
    ``reason``: of the search, for people; ``split``: of the layers, None: for other places;
    ``refused``: layouts that cannot be, with all their numbers."""

    reason: str
    spec: JobSpec
    layout: Layout
    network: Network
    late: Late
    cost: float
    split: Split | None = None
    refused: frozenset[RankLayout] = frozenset()

    @property
    def stay(self) -> str:
        """How to say that nothing changes."""
        what = "ranks stay at their places" if self.split is None else "layers stay where they are"
        return f"{what}: {self.reason}"


def search(asked: Question) -> Proposal | None:
    """The best other layout that was found; None if none is better."""
    if asked.split is None:
        return propose(
            asked.spec, asked.layout, asked.network, asked.late, asked.cost, without=asked.refused
        )
    return propose_layers(asked.split, asked.network, asked.late, asked.cost, without=asked.refused)


class Moves:
    """The changes of layout of one job, which are read from its ``generations``. ``note``: tells
    the user; ``clock``: monotonic, seconds."""

    def __init__(
        self,
        spec: JobSpec,
        generations: Generations,
        note: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.spec, self._clock, self._note = spec, clock, note
        self.told = ""
        """The newest note, for people."""
        self._generations = generations
        self._seen = generations.attempt, generations.saved.generation
        self._first = Layout.of(spec.parallelism)
        self.layout = self._first.changed(generations.layout)
        """The layout of the ranks that run."""
        self._wires = Wires(spec.adaptation)
        self._judged: tuple[tuple[int, ...], Mapping[Wire, float]] | None = None
        """What the last decision was made for: the places, and the late wires."""
        self._uneven: Uneven | None = None
        """Whether another split of the layers seems better."""
        self._judged_layers: tuple[tuple[int, ...], tuple[float, ...]] | None = None
        """What the last decision on layers was made for: the split, and what a layer took."""
        self._usual = 0.0
        """Seconds that messages of links take that are well."""
        self.asked: Move | None = None
        """The change that ranks have been asked for, and that does not count yet."""
        self._arriving: Move | None = None
        """The change after which no iteration is known to be finished."""
        self._stays_until = 0.0
        """By the clock."""
        self._looked_at = -inf
        self.made: list[Move] = []

    def note(self, text: str) -> None:
        self.told = one_line(text, 300)
        self._note(self.told)

    def is_due(self) -> bool:
        """Whether to look for another layout now: once a second, while ranks may be asked to
        leave."""
        now = self._clock()
        wanted = self.spec.adaptation.relayout and self.asked is None and not self.arrives
        if not wanted or now < self._looked_at + PLACES_SECONDS:
            return False
        generations = self._generations
        if generations.layout_before is not None or generations.state.over:
            return False
        self._looked_at = now
        return generations.layouts.move

    @property
    def _rests(self) -> bool:
        return self._clock() < self._stays_until

    # --- decisions ------------------------------------------------------------------------

    def consider(self, network: Network, cost: float, finished: Timed) -> Move | None:
        """A change that pays, if what is known has changed since the last decision; with its search
        here and now. ``cost``: seconds that a change takes; ``finished``: as of :meth:`undo`."""
        move = self.undo(finished, network.left, cost)
        for question in () if move is not None else self.questions(network, cost):
            move = move or self.answer(question, search(question))
        return move

    def undo(self, finished: Timed, left: int, cost: float) -> Move | None:
        """The way back from the newest change, once it is known that it has made iterations slower,
        and if the ``left`` ones pay for that. ``finished``: the newest iterations."""
        move = next((each for each in reversed(self.made) if each.iteration is not None), None)
        if move is None or move.measured is not None:
            return None
        now = move.since(finished)
        if len(now) >= COMPARED:
            move.compare(now)
        if (measured := move.measured) is None:
            return None
        more = "less" if measured >= 0 else "more"
        text = (
            f"{move.where} an iteration takes {abs(measured):.0%} {more} time than before,"
            f" {move.proposal.promised:.0%} less promised"
        )
        self.note(text)
        if move.generation is not None:
            self._generations.brought(move.generation, measured)
        was, least = median(move.was), self.spec.adaptation.min_gain
        back = Proposal(move.before, median(now), was, cost, left, least)
        if move.undoes or self.layout != move.proposal.layout or not back.pays:
            return None
        return Move(f"{text}; so the change is undone", back, self.layout, undoes=True)

    def _see(self, network: Network) -> None:
        """Take what is known of the job's wires, before a question is asked. It is looked at each
        of them."""
        self._wires.see(self.layout, network)
        well = [link.wire_time for link in network.links if link.health is Health.HEALTHY]
        self._usual = median(well) if well else self._usual

    def questions(self, network: Network, cost: float) -> Iterator[Question]:
        """What to search for now: other places, then another split of the layers."""
        if self._rests:
            return
        if may_change_places(self.layout.mesh):
            self._see(network)
            if (places := self._of_places(network, cost)) is not None:
                yield places
        if (layers := self._of_layers(network, cost)) is not None:
            yield layers

    @property
    def _refused(self) -> frozenset[RankLayout]:
        return frozenset(self._generations.layouts.refused)

    def _of_places(self, network: Network, cost: float) -> Question | None:
        """Whether to look for other places of the ranks; None: there is nothing new."""
        late = dict(self._wires.late)
        if self._wires.waits(self.layout, network) or not self._has_news(late):
            return None
        reason = f"late: {named(late)}" if late else "no wire is late any more"
        return Question(reason, self.spec, self.layout, network, late, cost, refused=self._refused)

    def _of_layers(self, network: Network, cost: float) -> Question | None:
        """Whether to look for another split of the layers; None: not now."""
        if not self.spec.parallelism.layers or self._generations.layouts.fixed:
            return None
        if self.layout.layers and not network.beside.least:
            return None  # Nobody knows how much of a stage's time is that of its layers.
        now = self._clock()
        split = Split(self.spec, self.layout, network.stages, network.beside)
        if split.gain <= max(self.spec.adaptation.min_gain, SAME):
            self._uneven = None
            return None
        slowest = split.times.index(max(split.times))
        if self._uneven is None or not self._uneven.goes_on(slowest, now):
            self._uneven = Uneven(slowest, now, network.left)
        new = self._uneven.see(split.times, now, network.left)
        if not new or not self._uneven.confirms(split.gain, now, network.left):
            return None
        if not self._layers_have_news(split):
            return None
        times = f"{1e3 * split.times[slowest]:.1f} ms of a microbatch"
        others = 1e3 * median(t for i, t in enumerate(split.times) if i != slowest)
        reason = f"stage {slowest} computes for {times}, the others for {others:.1f} ms"
        if not may_change_places(self.layout.mesh):
            # Of a large job wires are many.
            self._see(network)
        late = dict(self._wires.late)
        return Question(reason, self.spec, self.layout, network, late, cost, split, self._refused)

    def answer(self, asked: Question, found: Proposal | None) -> Move | None:
        """The change that pays, by what :func:`search` has found for a question. It is dropped if
        the layout is another one meanwhile, or ranks are asked to leave."""
        if asked.layout != self.layout or self.asked is not None:
            return None
        if asked.split is None:
            self._judged = self.layout.places, asked.late
        else:
            self._judged_layers = self.layout.layers, asked.split.each
        if found is None:
            what = "places" if asked.split is None else "split"
            self.note(f"{asked.stay}; no other {what} would be faster")
            return None
        if asked.split is None:
            moved = len(self.layout.moved(found.layout))
            told = f"{moved} ranks at other places would make an iteration {found.after:.3f} s"
        else:
            counts = ", ".join(map(str, found.layout.spread(asked.split.total)))
            told = f"with {counts} layers an iteration would take {found.after:.3f} s"
        told += f" instead of {found.before:.3f} s"
        if found.pays:
            return Move(f"{asked.reason}; {told}", found, self.layout)
        self.note(
            f"{asked.stay}; {told}; that would save {found.saved:.1f} s and cost {found.cost:.1f} s"
        )
        return None

    def _layers_have_news(self, split: Split) -> bool:
        """Whether what layers take has changed since the last decision on them."""
        if self._judged_layers is None or self._judged_layers[0] != self.layout.layers:
            return True
        pairs = zip(split.each, self._judged_layers[1], strict=True)
        return any(abs(now - was) > LAYER_CHANGED * was for now, was in pairs)

    def _has_news(self, late: Late) -> bool:
        """Whether what decisions are made for has changed since the last one."""
        if self._judged is None:
            return bool(late)
        places, judged = self._judged
        if places != self.layout.places or judged.keys() != late.keys():
            return True
        return any(abs(late[wire] - was) > CHANGED * was for wire, was in judged.items())

    def late_links(self) -> list[LinkState]:
        """The links over wires that are known to be late."""
        mesh, late = self.layout.mesh, self._wires.late
        return [
            LinkState(
                link=link,
                health=Health.SLOW,
                replica=column,
                direction=direction,
                delay=late[wire],
                bases={Route.DIRECT.value: self._usual},
            )
            for column in range(mesh.columns)
            for link in range(mesh.stages - 1)
            if (wire := self.layout.link(link, column)) in late
            for direction in get_args(Direction)
        ]

    # --- what has become of a change ------------------------------------------------------

    def ask(self, move: Move) -> None:
        """The ranks are to leave."""
        self.made.append(move)
        self.asked = move
        what = "layers move" if move.of_layers else "the ranks change places"
        self.note(f"{what}: {move.reason}")

    def stay(self, why: str) -> None:
        """The ranks that were asked to leave go on as they are."""
        move = self.asked
        assert move is not None, "nobody asked the ranks to leave"
        move.outcome, move.why, self.asked, self._uneven = "stayed", why, None, None
        self._rest(move)
        stay = "layers stay where they are" if move.of_layers else "the ranks stay at their places"
        self.note(f"{stay}: {why}")

    def follow(self, finished: Timed) -> bool:
        """Take which generation runs, and with which layout. ``finished``: the newest iterations.
        Returns whether the layout is another one."""
        generations = self._generations
        before, self.layout = self.layout, self._first.changed(generations.layout)
        now, last = (generations.attempt, generations.saved.generation), self._seen
        self._seen = now
        if now != last:
            self._uneven = None
            self._begin(finished, again=now[0] != last[0])
        elif (move := self.asked) is None:
            pass
        elif move.outcome == "left" and generations.layout_before is None:
            self._counts(move)
        elif move.outcome == "asked" and not generations.layouts.asked:
            self.stay(generations.stays or "they were not asked to leave")
        return self.layout != before

    def _begin(self, finished: Timed, *, again: bool) -> None:
        """Another generation runs. ``again``: in another attempt, in which all begins anew."""
        move, on_trial = self.asked, self._generations.layout_before is not None
        there = move is not None and self.layout == move.proposal.layout and not again
        if again:
            self._judged = self._judged_layers = None
        if move is None:
            if self._arriving is not None:
                self._rest(self._arriving)
        elif there and move.outcome == "asked" and on_trial:
            move.outcome, move.generation = "left", self._seen[1]
            move.was = [each.seconds for each in finished[-BEFORE:]]
        elif there and not on_trial:
            self._counts(move)
        else:
            self.asked = None
            self._rest(move)
            move.outcome = "went back" if move.outcome == "left" else "stayed"
            begun = "they had trained with the new layout" if move.generation else "they had left"
            fixed = self._generations.layouts.fixed if move.of_layers else ""
            move.why = fixed or f"ranks failed before {begun}"
        if again:
            self._arriving = None

    def _counts(self, move: Move) -> None:
        """The new layout counts from now on."""
        move.outcome, self.asked = "moved", None
        # Until then nothing is known of the network as these places use it.
        self._arriving, self._stays_until = move, inf

    def edit(self, spec: JobSpec) -> None:
        """``adaptation`` of the job is another one."""
        self.spec, self._wires.adaptation = spec, spec.adaptation

    def arrived(self, iteration: int, seconds: float) -> None:
        """The ranks have finished their first iteration since they were started. ``seconds``: since
        ranks last left."""
        move, self._arriving = self._arriving, None
        if move is not None:
            move.iteration, move.seconds = iteration, round(seconds, 3)
            self._stays_until = self._clock() + REST * seconds
            self.note(f"{move.where} from iteration {iteration} on, after {seconds:.2f} s")

    @property
    def arrives(self) -> bool:
        """Whether a change counts after which no iteration is known to be finished."""
        return self._arriving is not None

    def _rest(self, move: Move) -> None:
        """A change has failed: the next one would, for the same reason."""
        self._stays_until = self._clock() + REST * move.proposal.cost


def records(moves: Moves, iterations: Timed) -> list[dict[str, Any]]:
    """The changes for ``report.json``, after the last of all ``iterations``."""
    made, layers = moves.made, moves.spec.parallelism.layers
    if moves.asked is not None:
        moves.asked.outcome, moves.asked.why = "stayed", "the run ended before"
    end = inf
    for move in reversed(made):
        if move.measured is None:
            move.compare(move.since(iterations, end))
        end = end if move.iteration is None else move.iteration
    return [_record(move, layers) for move in made]


def _record(move: Move, layers: int | None) -> dict[str, Any]:
    """One change. ``layers``: of the model."""
    asked = move.proposal
    return {
        "reason": move.reason,
        "outcome": move.outcome,
        "why": move.why or None,
        "generation": move.generation,
        "iteration": move.iteration,
        "places": list(asked.layout.places),
        "moved": list(move.before.moved(asked.layout)),
        "layers": None if layers is None else list(asked.layout.spread(layers)),
        "layers_before": None if layers is None else list(move.before.spread(layers)),
        "predicted_seconds_before": asked.before,
        "predicted_seconds_after": asked.after,
        "promised": asked.promised,
        "measured": move.measured,
        "expected_cost_seconds": asked.cost,
        "seconds": move.seconds,
    }
