"""Order in which the parts of a command run, and the parts that do not run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from gate.parts import Part
from gate.plan import PartPlan

POLL_SECONDS = 1.0


class Testbeds(Protocol):
    """Methods of :class:`gate.testbeds.TestbedBuild` that the schedule needs."""

    def building(self) -> list[str]: ...

    def why_failed(self, needs: Sequence[str]) -> str | None: ...


class Schedule:
    """Gives the parts of ``plans`` to lanes, in order, each when its testbeds are ready.

    ``make``: builds the part of a plan. ``seconds_remaining``: until the time at which a run that
    still waits for testbeds stops.
    """

    def __init__(
        self,
        plans: Sequence[PartPlan],
        make: Callable[[PartPlan], Part],
        testbeds: Testbeds,
        seconds_remaining: Callable[[], float],
    ) -> None:
        self._waiting = list(plans)
        self._make, self._testbeds, self._seconds_remaining = make, testbeds, seconds_remaining
        self._changed = threading.Condition()
        self.not_run: dict[str, str] = {}
        """Reason for each part that cannot run."""
        self.stopped: str | None = None
        """Reason why the run stopped, in one line; None if it did not."""

    def take(self) -> Part | None:
        """The next part, once there is one whose testbeds are ready; None at the end."""
        with self._changed:
            while self._waiting:
                building = self._testbeds.building()
                for plan in list(self._waiting):
                    if (why := self._testbeds.why_failed(plan.needs)) is not None:
                        self._waiting.remove(plan)
                        self.not_run[plan.name] = why
                    elif not set(plan.needs) & set(building):
                        self._waiting.remove(plan)
                        return self._make(plan)
                if not self._waiting:
                    break
                if self._seconds_remaining() <= 0:
                    self._stop(building)
                    break
                self._changed.wait(POLL_SECONDS)
        return None

    def _stop(self, building: Sequence[str]) -> None:
        names = [plan.name for plan in self._waiting]
        self.stopped = (
            f"stopped: {', '.join(building)} still being built when too little time remained to "
            f"test with; did not run: {', '.join(names)}"
        )
        for name in names:
            self.not_run[name] = (
                f"no time remained when {', '.join(building)} was still being built"
            )
        self._waiting.clear()
