"""Pauses of Python's garbage collector on a rank: measured, and moved between iterations if they
are long.

A pause on one stage delays all other ranks, and pauses on different stages add up. Between two
iterations all ranks pause at once, so that only the longest counts.
"""

from __future__ import annotations

import gc
import logging
import os
from collections import deque
from collections.abc import Callable
from time import perf_counter, time
from typing import Any, Literal, NamedTuple

log = logging.getLogger("pipemorph.trainer")

CollectorChoice = Literal["auto", "off"]
MOST_SHARE = 0.005
"""Share of the time in pauses above which the collector is moved between iterations."""
LEAST_ITERATIONS, MOST_ITERATIONS = 8, 64
"""Least and most newest iterations over which the share is measured. The first one, in which much
is imported and compiled, does not count."""
MOST_UNREAD = 1024
"""Most newest pauses that are held until they are read."""
FULL_BOUNDARIES = 32
"""Boundaries from one collection of all generations to the next; the others collect what was
allocated since the last boundary."""
INTERPRETER_THRESHOLDS = ((700, 10, 10), (2000, 10, 10), (2000, 10, 0))
"""Thresholds with which CPython starts, by release."""

_inherited_frozen = 0
"""Number of objects that were frozen by the process from which this one was forked."""


def _count_inherited_objects() -> None:
    global _inherited_frozen  # noqa: PLW0603  one interpreter, one collector
    _inherited_frozen = gc.get_freeze_count()


os.register_at_fork(after_in_child=_count_inherited_objects)


def find_own_handling() -> str:
    """Describe the script's own handling of the collector; empty if it has none."""
    if not gc.isenabled():
        return "the script has disabled it"
    if (thresholds := gc.get_threshold()) not in INTERPRETER_THRESHOLDS:
        return f"the script has set its thresholds to {thresholds}"
    if gc.get_freeze_count() > _inherited_frozen:
        return "the script has frozen objects"
    return ""


class PauseTimes(NamedTuple):
    """Seconds of an iteration in which the collector paused this rank: ``inside`` it, and
    ``between`` it and the next one."""

    inside: float = 0.0
    between: float = 0.0


class CollectorPauses:
    """Collector of this process, during a pipeline. Main thread only.

    ``auto``: if a rank's pauses take more than :data:`MOST_SHARE` of its time, all ranks stop the
    collector at the same iteration boundary, by its first threshold, freeze what is alive, and
    collect at every boundary. A script's own handling wins, also later: unlike the switch of
    ``gc.disable``, a threshold shows whether somebody else has changed it. ``off``: pauses are only
    measured. ``place`` begins log lines.
    """

    def __init__(
        self, choice: CollectorChoice, place: str, *, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._place, self._clock = place, clock
        self._may_move, self._moved = choice == "auto", False
        self._at_boundary = False
        self._pause_began: float | None = None
        self._inside = self._between = 0.0
        self._paused = 0.0
        self._began = clock()
        self._warm = False
        self._newest: deque[tuple[float, float]] = deque(maxlen=MOST_ITERATIONS)
        """Seconds of pauses, and of the whole iteration, of the newest iterations."""
        self._unread: deque[tuple[float, float]] = deque(maxlen=MOST_UNREAD)
        """Start and end of the newest pauses, wall clock."""
        self._boundaries = self._frozen = 0
        self._thresholds = gc.get_threshold()

    @property
    def _stopped_thresholds(self) -> tuple[int, int, int]:
        return (0, *self._thresholds[1:])

    @property
    def exceeds_limit(self) -> bool:
        """True if pauses take too much of the time and may be moved: a request to all ranks."""
        enough = self._may_move and not self._moved and len(self._newest) >= LEAST_ITERATIONS
        return enough and self._compute_share() > MOST_SHARE

    def count_paused(self) -> float:
        """Return the seconds of all pauses so far."""
        return self._paused

    def drain_pauses(self) -> list[tuple[float, float]]:
        """Return start and end of each pause since the last call, wall-clock seconds."""
        found = list(self._unread)
        self._unread.clear()
        return found

    def begin_iteration(self) -> None:
        """Begin an iteration: pauses so far, as in an evaluation, do not count."""
        if self._measure_pause not in gc.callbacks:
            # Not earlier: a pipeline that does not begin is not closed.
            gc.callbacks.append(self._measure_pause)
        self._inside = self._between = 0.0
        self._began = self._clock()

    def pass_boundary(self, *, requested: bool) -> None:
        """Collect between two calls of the pipeline if the collector was moved there.

        ``requested``: pauses of a rank were too long; equal on all ranks.
        """
        if self._moved and gc.get_threshold() != self._stopped_thresholds:
            log.info("%s: garbage collection: the script has set its thresholds", self._place)
            self._may_move = self._moved = False
        if not self._moved and not (requested and self._may_move and self._begin_moving()):
            return
        self._boundaries += 1
        self._at_boundary = True
        gc.collect(1 if self._boundaries % FULL_BOUNDARIES else 2)
        self._at_boundary = False

    def end_iteration(self) -> PauseTimes:
        """Return the pauses since the iteration began, with those at its end."""
        found = PauseTimes(self._inside, self._between)
        if self._warm:
            self._newest.append((sum(found), self._clock() - self._began))
        self._warm = True
        return found

    def close(self) -> None:
        """Restore the collector as it was, and stop measuring. Idempotent."""
        if self._measure_pause not in gc.callbacks:
            return
        gc.callbacks.remove(self._measure_pause)
        if self._frozen and self._frozen >= gc.get_freeze_count():
            # Else the script has frozen more, and that stays.
            gc.unfreeze()
        if self._moved:
            if gc.get_threshold() == self._stopped_thresholds:
                gc.set_threshold(*self._thresholds)
            log.info(
                "%s: garbage collection took %.2f %% of the time, between iterations",
                self._place, 100 * self._compute_share(),
            )  # fmt: skip
        self._moved = False

    def _begin_moving(self) -> bool:
        """Stop and freeze. False if the script handles the collector itself."""
        if why := find_own_handling():
            log.info("%s: garbage collection stays as it is: %s", self._place, why)
            self._may_move = False
            return False
        log.info(
            "%s: garbage collection took %.2f %% of the time inside iterations; it runs between"
            " iterations from now on",
            self._place, 100 * self._compute_share(),
        )  # fmt: skip
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*self._stopped_thresholds)
        self._at_boundary = True
        gc.collect()
        self._at_boundary = False
        if not gc.get_freeze_count():
            # Else a parent process has frozen objects, and nothing unfreezes only the others.
            gc.freeze()
            self._frozen = gc.get_freeze_count()
        self._newest.clear()
        self._moved = True
        return True

    def _compute_share(self) -> float:
        whole = sum(seconds for _, seconds in self._newest)
        return sum(paused for paused, _ in self._newest) / whole if whole > 0 else 0.0

    def _measure_pause(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._pause_began = self._clock()
        elif self._pause_began is not None:
            seconds, self._pause_began = self._clock() - self._pause_began, None
            self._unread.append(((now := time()) - seconds, now))
            self._paused += seconds
            if self._at_boundary:
                self._between += seconds
            else:
                self._inside += seconds
