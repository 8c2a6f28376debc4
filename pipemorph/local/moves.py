"""Changes the layout of a run: decides, asks the ranks to leave, and goes back if that fails. Ranks
change their places, or layers move between stages.

A change is a change of generation. All ranks leave at one iteration, each with a sealed copy of its
state; those that follow begin with these copies at their new places, or with other parts. Until all
of them have met with the state that was left, and with other parts have finished iterations, the
layout before counts, and a failure goes back to it: the copies are still there.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, get_args

from pipemorph.api.layout import Layout, Wire
from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.layers import CHANGED as LAYER_CHANGED
from pipemorph.control.decide.layers import Beside, Split, propose_layers
from pipemorph.control.decide.relayout import (
    SAME,
    Late,
    Network,
    Proposal,
    Wires,
    named,
    propose,
)
from pipemorph.control.observed.links import Health
from pipemorph.exits import PARTS_STAY
from pipemorph.local.processes.kept import KeptFolder
from pipemorph.planning import Route
from pipemorph.wire import IterationSample, SlowDirection
from pipemorph.wire.states import Direction

BEFORE, SETTLES, AFTER = 3, 8, 32
"""Iterations before a change whose median is compared; after it, those in which plans settle, and
those that are compared."""

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

    @property
    def of_layers(self) -> bool:
        """Whether layers move between stages; else ranks change places."""
        return self.before.layers != self.proposal.layout.layers

    @property
    def where(self) -> str:
        return "with other layers" if self.of_layers else "at other places"

    def record(
        self, iterations: Sequence[IterationSample], end: int | None, layers: int | None
    ) -> dict[str, Any]:
        """For ``report.json``. ``end``: the iteration of the next change; ``layers``: of the
        model."""
        at, asked = self.iteration, self.proposal
        was: list[float] = []
        now: list[float] = []
        if at is not None:
            was = [s.seconds for s in iterations if at - BEFORE <= s.index < at]
            last = min(at + SETTLES + AFTER, at + SETTLES + AFTER if end is None else end)
            now = [s.seconds for s in iterations if at + SETTLES <= s.index < last]
        return {
            "reason": self.reason,
            "outcome": self.outcome,
            "why": self.why or None,
            "generation": self.generation,
            "iteration": at,
            "places": list(asked.layout.places),
            "moved": list(self.before.moved(asked.layout)),
            "layers": None if layers is None else list(asked.layout.spread(layers)),
            "layers_before": None if layers is None else list(self.before.spread(layers)),
            "predicted_seconds_before": asked.before,
            "predicted_seconds_after": asked.after,
            "promised": 1 - asked.after / asked.before,
            "measured": 1 - median(now) / median(was) if was and now else None,
            "expected_cost_seconds": asked.cost,
            "seconds": self.seconds,
        }


class Moves:
    """The layouts of one run. ``note``: tells the user."""

    def __init__(self, spec: JobSpec, note: Callable[[str], None]) -> None:
        self._spec, self._note = spec, note
        self._first = Layout.of(spec.parallelism)
        self.layout = self._settled = self._first
        """The layout of the ranks that run, and the last one in which all have met."""
        self._wires = Wires(spec.adaptation)
        self._judged: tuple[tuple[int, ...], dict[Wire, float]] | None = None
        """What the last decision was made for: the places, and the late wires."""
        self._beside = Beside(spec)
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
        self._asked: Move | None = None
        self._arriving: Move | None = None
        """The change after which no iteration has been finished yet."""
        self._stays_until = 0.0
        """Monotonic."""
        self.made: list[Move] = []

    @property
    def decides(self) -> bool:
        """Whether ranks may be asked to leave."""
        wanted = self._spec.adaptation.relayout and self._asked is None
        return wanted and time.monotonic() >= self._stays_until

    @property
    def leaving(self) -> bool:
        """Whether the ranks that run have been asked to leave."""
        return self._asked is not None and self._asked.outcome == "asked"

    def consider(self, network: Network, cost: float) -> Move | None:
        """A change that pays, if what is known has changed since the last decision. ``cost``:
        seconds that a change takes."""
        self._wires.see(self.layout, network)
        self._beside.see(self.layout, network.stages)
        well = [link.wire_time for link in network.links if link.health is Health.HEALTHY]
        self._usual = median(well) if well else self._usual
        # What a late wire costs ranks that share a stage, which talk within each op, nobody measures.
        alone = self.layout.mesh.lockstep == 1
        places = self._other_places(network, cost) if self.layout.rings and alone else None
        return places or self._other_layers(network, cost)

    def _other_places(self, network: Network, cost: float) -> Move | None:
        late = self._wires.late
        if self._wires.waits(self.layout, network) or not self._has_news(late):
            return None
        self._judged = self.layout.places, dict(late)
        reason = f"late: {named(late)}" if late else "no wire is late any more"
        found = propose(self._spec, self.layout, network, late, cost)
        if found is None:
            self._note(f"ranks stay at their places: {reason}; no others would be faster")
            return None
        told = (
            f"{reason}; {len(self.layout.moved(found.layout))} ranks at other places would make an"
            f" iteration {found.after:.3f} s instead of {found.before:.3f} s"
        )
        return self._if_it_pays(Move(told, found, self.layout), "ranks stay at their places")

    def _other_layers(self, network: Network, cost: float) -> Move | None:
        if self._parts_stay:
            return None
        now = time.monotonic()
        split = Split(self._spec, self.layout, network.stages, self._beside)
        if split.gain <= max(self._spec.adaptation.min_gain, SAME):
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
        self._judged_layers = self.layout.layers, split.each
        times = f"{1e3 * split.times[slowest]:.1f} ms of a microbatch"
        others = 1e3 * median(t for i, t in enumerate(split.times) if i != slowest)
        reason = f"stage {slowest} computes for {times}, the others for {others:.1f} ms"
        late = self._wires.late
        found = propose_layers(split, network, late, cost, without=self._refused)
        if found is None:
            self._note(f"layers stay where they are: {reason}; no other split would be faster")
            return None
        counts = ", ".join(map(str, found.layout.spread(split.total)))
        told = (
            f"{reason}; with {counts} layers an iteration would take {found.after:.3f} s instead of"
            f" {found.before:.3f} s"
        )
        return self._if_it_pays(Move(told, found, self.layout), "layers stay where they are")

    def _if_it_pays(self, move: Move, stay: str) -> Move | None:
        found = move.proposal
        if found.pays:
            return move
        self._note(
            f"{stay}: {move.reason}; that would save {found.saved:.1f} s and cost"
            f" {found.cost:.1f} s"
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

    def ask(self, move: Move, kept: KeptFolder, generation: int) -> None:
        """Have the ranks of a generation leave."""
        self.made.append(move)
        what = "layers move" if move.of_layers else "the ranks change places"
        self._note(f"{what}: {move.reason}")
        layers = self._spec.parallelism.layers
        try:
            if move.of_layers and layers is not None:
                kept.ask_to_leave(generation, move.proposal.layout.spread(layers))
            else:
                kept.ask_to_leave(generation)
        except OSError as error:
            self._stay(move, f"they cannot be told: {kept.root}: {error.strerror}")
        else:
            self._asked = move

    def look(self, kept: KeptFolder, generation: int) -> None:
        """See whether the ranks stay, or the new layout counts. Ranks with other parts say so when
        they have finished iterations: only then is it known that the parts can be trained."""
        move = self._asked
        if move is None:
            return
        if move.outcome == "asked" and (why := kept.stay(generation)) is not None:
            kept.stop_asking(generation)
            self._stay(move, why)
        elif move.outcome == "left":
            resumed = kept.resumed(generation)
            if resumed is not None and resumed.rung == "kept":
                self._settled, move.outcome, self._asked = self.layout, "moved", None
                # Until then nothing is known of the network as these places use it.
                self._arriving, self._stays_until = move, math.inf
            elif not move.why and (told := kept.stay(generation) or "").startswith(PARTS_STAY):
                self._note(told)
                self._parts_stay, move.why = True, told

    def _stay(self, move: Move, why: str) -> None:
        move.outcome, move.why, self._asked, self._uneven = "stayed", why, None, None
        self._rest(move)
        # That is so as long as their script is the same.
        self._parts_stay = self._parts_stay or why.startswith(PARTS_STAY)
        stay = "layers stay where they are" if move.of_layers else "the ranks stay at their places"
        self._note(f"{stay}: {why}")

    def _rest(self, move: Move) -> None:
        """A change has failed: the next one would, for the same reason."""
        self._stays_until = time.monotonic() + REST * move.proposal.cost

    def late_links(self) -> list[SlowDirection]:
        """The links over wires that are known to be late."""
        mesh, late = self.layout.mesh, self._wires.late
        return [
            SlowDirection(
                link=link,
                column=column,
                direction=direction,
                delay=late[wire],
                bases={Route.DIRECT.value: self._usual},
            )
            for column in range(mesh.columns)
            for link in range(mesh.stages - 1)
            if (wire := self.layout.link(link, column)) in late
            for direction in get_args(Direction)
        ]

    def left(self, generation: int) -> Move:
        """The ranks have left; those of ``generation`` have the new layout. Returns the
        change."""
        move = self._asked
        assert move is not None, "nobody asked the ranks to leave"
        move.outcome, move.generation, self._uneven = "left", generation, None
        self.layout = move.proposal.layout
        return move

    @property
    def settling(self) -> bool:
        """Whether the ranks that run have a new layout, which does not count yet."""
        return self._asked is not None and self._asked.outcome == "left"

    def factors(self, before: Layout) -> tuple[float, ...]:
        """By stage, how many times the work of ``before`` it has now; empty: the same."""
        layers = self._spec.parallelism.layers
        if layers is None or before.layers == self.layout.layers:
            return ()
        return self._beside.factors(before.spread(layers), self.layout.spread(layers))

    def failed(self, *, attempt: bool) -> bool:
        """The ranks failed. With an ``attempt`` all begins anew. Returns whether those that follow
        have another layout."""
        move, self._asked = self._asked, None
        self._uneven = None
        if (failed := move or self._arriving) is not None:
            self._rest(failed)
        if move is not None:
            move.outcome = "went back" if move.outcome == "left" else "stayed"
            if not move.why:
                met = "they had gone on with other layers" if move.of_layers else "all had met"
                move.why = f"ranks failed before {met}" if move.generation else "ranks failed"
            if move.generation and move.of_layers:
                self._refused.add(move.proposal.layout.layers)
        before = self.layout
        if attempt:
            self._settled, self._judged, self._arriving = self._first, None, None
            self._judged_layers = None
        self.layout = self._settled
        return self.layout != before

    def arrived(self, iteration: int, seconds: float) -> None:
        """The ranks have finished their first iteration since they were started. ``seconds``: since
        ranks last left for other places."""
        move, self._arriving = self._arriving, None
        if move is not None:
            move.iteration, move.seconds = iteration, round(seconds, 3)
            self._stays_until = time.monotonic() + REST * seconds
            self._note(f"{move.where} from iteration {iteration} on, after {seconds:.2f} s")

    def records(self, iterations: Sequence[IterationSample]) -> list[dict[str, Any]]:
        """For ``report.json``, after the last iteration."""
        if self._asked is not None:
            self._asked.outcome, self._asked.why = "stayed", "the run ended before"
        ends = [move.iteration for move in self.made[1:]]
        return [
            move.record(iterations, end, self._spec.parallelism.layers)
            for move, end in zip(self.made, [*ends, None], strict=False)
        ]
