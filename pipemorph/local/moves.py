"""Changes the places of a run's ranks: decides, asks them to leave, and goes back if that fails.

A change is a change of generation. All ranks leave at one iteration, each with a sealed copy of its
state; those that follow begin with these copies at their new places. Until all of them have met
with the state that was left, the layout before counts, and a failure goes back to it: the copies
are still there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, get_args

from pipemorph.api.layout import Layout
from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.relayout import Network, Proposal, Wires, named, propose
from pipemorph.control.observed.links import Health
from pipemorph.local.processes.kept import KeptFolder
from pipemorph.planning import Route
from pipemorph.wire import IterationSample, SlowDirection
from pipemorph.wire.states import Direction

BEFORE, SETTLES, AFTER = 3, 8, 32
"""Iterations before a change whose median is compared; after it, those in which plans settle, and
those that are compared."""

REST = 10.0
"""After a change ranks stay for so many times the seconds that it took, whatever is measured."""


@dataclass
class Move:
    """One change of places. ``outcome``: ``asked``, ``left``, ``moved``, ``stayed`` or ``went
    back``. ``seconds``: from when the ranks left to the end of the next iteration."""

    reason: str
    proposal: Proposal
    before: Layout
    outcome: str = "asked"
    why: str = ""
    generation: int | None = None
    iteration: int | None = None
    """The first one at the new places."""
    seconds: float | None = None

    def record(self, iterations: Sequence[IterationSample], end: int | None) -> dict[str, Any]:
        """For ``report.json``. ``end``: the iteration of the next change."""
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
        self._judged: object = None
        """What the last decision was made for."""
        self._usual = 0.0
        """Seconds that messages of links take that are well."""
        self._asked: Move | None = None
        self._stays_until = 0.0
        """Monotonic."""
        self.made: list[Move] = []

    @property
    def decides(self) -> bool:
        """Whether ranks may be asked to leave."""
        wanted = self._spec.adaptation.relayout and self._asked is None
        return wanted and time.monotonic() >= self._stays_until

    def consider(self, network: Network, cost: float) -> Move | None:
        """A change that pays, if what is known of the wires has changed since the last decision.
        ``cost``: seconds that a change takes."""
        self._wires.see(self.layout, network)
        well = [link.wire_time for link in network.links if link.health is Health.HEALTHY]
        self._usual = median(well) if well else self._usual
        late = self._wires.late
        if self._wires.waits(network):
            return None
        known = (self.layout.places, {wire: round(1e3 * each, -1) for wire, each in late.items()})
        if known == self._judged or (self._judged is None and not late):
            return None
        self._judged = known
        reason = f"late: {named(late)}" if late else "no wire is late any more"
        found = propose(self._spec, self.layout, network, late, cost)
        if found is None:
            self._note(f"ranks stay at their places: {reason}; no others would be faster")
            return None
        told = (
            f"{reason}; {len(self.layout.moved(found.layout))} ranks at other places would make an"
            f" iteration {found.after:.3f} s instead of {found.before:.3f} s"
        )
        if not found.pays:
            self._note(
                f"ranks stay at their places: {told}; that would save {found.saved:.1f} s and cost"
                f" {cost:.1f} s"
            )
            return None
        return Move(told, found, self.layout)

    def ask(self, move: Move, kept: KeptFolder, generation: int) -> None:
        """Have the ranks of a generation leave."""
        self.made.append(move)
        self._note(f"the ranks change places: {move.reason}")
        try:
            kept.ask_to_leave(generation)
        except OSError as error:
            self._stay(move, f"they cannot be told: {kept.root}: {error.strerror}")
        else:
            self._asked = move

    def look(self, kept: KeptFolder, generation: int) -> None:
        """See whether the ranks stay, or have met at their new places."""
        move = self._asked
        if move is None:
            return
        if move.outcome == "asked" and (why := kept.stay(generation)) is not None:
            self._stay(move, why)
        elif move.outcome == "left" and kept.resumed(generation) is not None:
            self._settled, move.outcome, self._asked = self.layout, "moved", None

    def _stay(self, move: Move, why: str) -> None:
        move.outcome, move.why, self._asked = "stayed", why, None
        self._note(f"the ranks stay at their places: {why}")

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

    def left(self, generation: int) -> str:
        """The ranks have left; those of ``generation`` are to run elsewhere. Returns why."""
        move = self._asked
        assert move is not None, "nobody asked the ranks to leave"
        move.outcome, move.generation = "left", generation
        self.layout = move.proposal.layout
        return move.reason

    def failed(self, *, attempt: bool) -> bool:
        """The ranks failed. With an ``attempt`` all begins anew. Returns whether those that follow
        run at other places."""
        move, self._asked = self._asked, None
        if move is not None:
            move.outcome = "went back" if move.outcome == "left" else "stayed"
            move.why = "ranks failed before all had met" if move.generation else "ranks failed"
        before = self.layout
        if attempt:
            self._settled, self._judged = self._first, None
        self.layout = self._settled
        return self.layout != before

    def arrived(self, generation: int, iteration: int, seconds: float) -> None:
        """The ranks of a generation have finished their first iteration, so many seconds after
        those before had ended."""
        for move in self.made:
            if move.generation == generation and move.outcome == "moved":
                move.iteration, move.seconds = iteration, round(seconds, 3)
                self._stays_until = time.monotonic() + REST * seconds
                self._note(f"at other places from iteration {iteration} on, after {seconds:.2f} s")

    def records(self, iterations: Sequence[IterationSample]) -> list[dict[str, Any]]:
        """For ``report.json``, after the last iteration."""
        if self._asked is not None:
            self._asked.outcome, self._asked.why = "stayed", "the run ended before"
        ends = [move.iteration for move in self.made[1:]]
        return [
            move.record(iterations, end)
            for move, end in zip(self.made, [*ends, None], strict=False)
        ]
