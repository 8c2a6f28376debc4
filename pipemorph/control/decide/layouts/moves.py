"""Which layout a job's ranks have, when they should have another one, and which one counts: ranks
change their places, or layers move between stages. Pure, with a clock that is given.

A change is a change of generation. All ranks leave at one iteration, each with a sealed copy of its
state; those that follow begin with these copies at their new places, or with other parts. Until all
of them have met with the state that was left, and with other parts have finished iterations, the
layout before counts, and a failure goes back to it: the copies are still there.

How ranks are asked, and how they answer, is the host's: it tells what it has done and heard.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import get_args

from pipemorph.api.layout import Layout, Wire
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
from pipemorph.exits import PARTS_STAY
from pipemorph.planning import Route
from pipemorph.wire import Health, LinkState
from pipemorph.wire.states import Direction

PLACES_SECONDS = 1.0
"""Time from one look at the network, for another layout of the ranks, to the next."""

BEFORE, SETTLES, AFTER = 3, 8, 32
"""Iterations before a change whose median is compared; after it, those in which plans settle, and
the most that are compared."""

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


def brought(was: Sequence[float], now: Sequence[float]) -> float | None:
    """The part of an iteration that a change has saved, by the seconds of some before it and after
    it; None if there are none."""
    return 1 - median(now) / median(was) if was and now else None


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
    ``refused``: splits that cannot be."""

    reason: str
    spec: JobSpec
    layout: Layout
    network: Network
    late: Late
    cost: float
    split: Split | None = None
    refused: frozenset[tuple[int, ...]] = frozenset()

    @property
    def stay(self) -> str:
        """How to say that nothing changes."""
        what = "ranks stay at their places" if self.split is None else "layers stay where they are"
        return f"{what}: {self.reason}"


def search(asked: Question) -> Proposal | None:
    """The best other layout that was found; None if none is better."""
    if asked.split is None:
        return propose(asked.spec, asked.layout, asked.network, asked.late, asked.cost)
    return propose_layers(asked.split, asked.network, asked.late, asked.cost, without=asked.refused)


class Moves:
    """The layouts of one job. ``note``: tells the user; ``clock``: monotonic, seconds.

    ``layers``, ``before``: of ranks that run already, the split that they have, and, while it is on
    trial, the one that counts; as of :attr:`Layout.layers`.
    """

    def __init__(
        self,
        spec: JobSpec,
        note: Callable[[str], None],
        clock: Callable[[], float],
        *,
        layers: tuple[int, ...] = (),
        before: tuple[int, ...] | None = None,
    ) -> None:
        self.spec, self.note, self._clock = spec, note, clock
        self._first = Layout.of(spec.parallelism)
        self.layout = self._first.with_layers(layers)
        self._settled = self.layout if before is None else self._first.with_layers(before)
        """:attr:`layout` is that of the ranks that run, this the last one in which all have met."""
        self._wires = Wires(spec.adaptation)
        self._judged: tuple[tuple[int, ...], Mapping[Wire, float]] | None = None
        """What the last decision was made for: the places, and the late wires."""
        self._uneven: Uneven | None = None
        """Whether another split of the layers seems better."""
        self._judged_layers: tuple[tuple[int, ...], tuple[float, ...]] | None = None
        """What the last decision on layers was made for: the split, and what a layer took."""
        self._refused: set[tuple[int, ...]] = set()
        """Splits with which ranks have failed."""
        self._parts_stay = not spec.parallelism.layers
        """Whether the ranks cannot have other parts."""
        self._usual = 0.0
        """Seconds that messages of links take that are well."""
        self.asked: Move | None = None
        """The change that ranks have been asked for, and that does not count yet."""
        self._arriving: Move | None = None
        """The change after which no iteration has been finished yet."""
        self._stays_until = 0.0
        """By the clock."""
        self.made: list[Move] = []

    @property
    def decides(self) -> bool:
        """Whether ranks may be asked to leave."""
        wanted = self.spec.adaptation.relayout and self.asked is None
        return wanted and self._clock() >= self._stays_until

    @property
    def leaving(self) -> bool:
        """Whether the ranks that run have been asked to leave."""
        return self.asked is not None and self.asked.outcome == "asked"

    @property
    def settling(self) -> bool:
        """Whether the ranks that run have a new layout, which does not count yet."""
        return self.asked is not None and self.asked.outcome == "left"

    # --- decisions ------------------------------------------------------------------------

    def consider(self, network: Network, cost: float) -> Move | None:
        """A change that pays, if what is known has changed since the last decision; with its search
        here and now. ``cost``: seconds that a change takes."""
        self.see(network)
        for question in self._questions(network, cost):
            move = self.answer(question, search(question))
            if move is not None:
                return move
        return None

    def see(self, network: Network) -> None:
        """Take what is known of the job's wires, before a question is asked. It is looked at each
        of them."""
        self._wires.see(self.layout, network)
        well = [link.wire_time for link in network.links if link.health is Health.HEALTHY]
        self._usual = median(well) if well else self._usual

    def _questions(self, network: Network, cost: float) -> Iterator[Question]:
        if (places := self.of_places(network, cost)) is not None:
            yield places
        if (layers := self.of_layers(network, cost)) is not None:
            yield layers

    def of_places(self, network: Network, cost: float) -> Question | None:
        """Whether to look for other places of the ranks; None: there is nothing new."""
        # Ranks that share a stage talk within each op, and nobody measures what a late wire costs.
        if not self.layout.rings or self.layout.mesh.lockstep > 1:
            return None
        late = dict(self._wires.late)
        if self._wires.waits(self.layout, network) or not self._has_news(late):
            return None
        reason = f"late: {named(late)}" if late else "no wire is late any more"
        return Question(reason, self.spec, self.layout, network, late, cost)

    def of_layers(self, network: Network, cost: float, *, seen: bool = True) -> Question | None:
        """Whether to look for another split of the layers; None: not now. ``seen``: whether
        :meth:`see` was told of ``network``; if not, it is once there is a question."""
        if self._parts_stay:
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
        if not seen:
            self.see(network)
        late, refused = dict(self._wires.late), frozenset(self._refused)
        return Question(reason, self.spec, self.layout, network, late, cost, split, refused)

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

    # --- what the host has done, and heard ------------------------------------------------

    def ask(self, move: Move) -> None:
        """The ranks are asked to leave."""
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
        # That is so as long as their script is the same.
        self._parts_stay = self._parts_stay or why.startswith(PARTS_STAY)
        stay = "layers stay where they are" if move.of_layers else "the ranks stay at their places"
        self.note(f"{stay}: {why}")

    def left(self, generation: int) -> Move:
        """The ranks have left; those of ``generation`` have the new layout. Returns the
        change."""
        move = self.asked
        assert move is not None, "nobody asked the ranks to leave"
        move.outcome, move.generation, self._uneven = "left", generation, None
        self.layout = move.proposal.layout
        return move

    def cannot(self, why: str) -> None:
        """The ranks of the new layout say why they cannot have it, before they fail."""
        move = self.asked
        if move is not None and not move.why and why.startswith(PARTS_STAY):
            self.note(why)
            self._parts_stay, move.why = True, why

    def counts(self) -> None:
        """The new layout counts from now on."""
        move = self.asked
        assert move is not None, "nobody asked the ranks to leave"
        self._settled, move.outcome, self.asked = self.layout, "moved", None
        # Until then nothing is known of the network as these places use it.
        self._arriving, self._stays_until = move, math.inf

    def failed(self, *, attempt: bool) -> bool:
        """The ranks failed. With an ``attempt`` all begins anew. Returns whether those that follow
        have another layout."""
        move, self.asked = self.asked, None
        self._uneven = None
        if (failed := move or self._arriving) is not None:
            self._rest(failed)
        if move is not None:
            move.outcome = "went back" if move.outcome == "left" else "stayed"
            if not move.why:
                met = "they had gone on with other layers" if move.of_layers else "all had met"
                move.why = f"ranks failed before {met}" if move.generation else "ranks failed"
            if move.generation and move.of_layers:
                self.refuse(move.proposal.layout.layers)
        before = self.layout
        if attempt:
            self._settled, self._judged, self._arriving = self._first, None, None
            self._judged_layers = None
        self.layout = self._settled
        return self.layout != before

    def edit(self, spec: JobSpec) -> None:
        """``adaptation`` of the job is another one."""
        self.spec, self._wires.adaptation = spec, spec.adaptation

    def refuse(self, layers: tuple[int, ...]) -> None:
        """Ranks have failed with this split: it is not tried again."""
        self._refused.add(layers)

    def follow(self, layers: tuple[int, ...]) -> None:
        """The ranks have this split, as another host has decided, and it counts."""
        self.layout = self._settled = self.layout.with_layers(layers)
        self._uneven = None

    @property
    def arrives(self) -> Move | None:
        """The change that counts, after which no iteration is known to be finished."""
        return self._arriving

    def arrived(self, iteration: int, seconds: float) -> None:
        """The ranks have finished their first iteration since they were started. ``seconds``: since
        ranks last left for other places."""
        move, self._arriving = self._arriving, None
        if move is not None:
            move.iteration, move.seconds = iteration, round(seconds, 3)
            self._stays_until = self._clock() + REST * seconds
            self.note(f"{move.where} from iteration {iteration} on, after {seconds:.2f} s")

    def _rest(self, move: Move) -> None:
        """A change has failed: the next one would, for the same reason."""
        self._stays_until = self._clock() + REST * move.proposal.cost
