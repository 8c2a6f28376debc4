"""Clock of a rank's time outside its ops, from the end of an iteration to that of the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, Literal

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pipemorph.protocol.op_traces import RankTimes

WindowPart = Literal["optimizer", "checkpoint", "data", "drawn", "tied"]


class WindowClock:
    """Clock of the parts of a window. Main thread only.

    The time between two steps is the script's, ``data``, but for its optimizers and for calls of
    the pipeline. Pauses of the garbage collector before the step are no part of them. ``clock``:
    monotonic, seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self.count_paused: Callable[[], float] = float
        """Source of the seconds in which the garbage collector has paused this process."""
        self._optimizer_began = self._optimizer_paused = 0.0
        self.restart()
        self._hooks = [
            register_optimizer_step_pre_hook(self._begin_optimizer),
            register_optimizer_step_post_hook(self._end_optimizer),
        ]

    @contextmanager
    def measure_part(self, part: WindowPart) -> Iterator[None]:
        """Context whose time is that of a part."""
        began, paused = self._clock(), self.count_paused()
        try:
            yield
        finally:
            # A pause in the step is in the list of its pauses, and in what it interrupts.
            counted = self.count_paused() - paused if part in ("data", "checkpoint") else 0.0
            self._add(part, self._clock() - began - counted)

    def begin_step(self) -> None:
        """Begin a step: the script's time is over."""
        spent = self._clock() - self._began - self._count_new_pauses()
        self._add("data", max(0.0, spent - sum(self._parts.values())))

    def restart(self) -> None:
        """Begin another window, after a call that is no step."""
        self._parts: dict[str, float] = {}
        self._began, self._began_paused = self._clock(), self.count_paused()

    def end_window(self, *, paused: float = 0.0, **more: Any) -> RankTimes:
        """End the window with its step, and begin the next one. ``paused``: seconds of the step in
        which the garbage collector paused it. ``more``: other fields."""
        began, before = self._began, max(0.0, self._count_new_pauses() - paused)
        measured: dict[str, Any] = {**self._parts} | more
        self.restart()
        return RankTimes(window=self._began - began, gc=before, **measured)

    def extend_window(self, times: RankTimes, norm: float, *, paused: float = 0.0) -> RankTimes:
        """Extend a window that has just ended by the gradient norm, at whose end all ranks are
        together. Returns its times. ``norm``: seconds in it; ``paused``: of them, seconds in which
        the garbage collector paused it."""
        began, optimizer = self._began, self._parts.get("optimizer", 0.0)
        between = max(0.0, self._count_new_pauses() - paused)
        self.restart()
        more = self._began - began
        update = {
            "window": times.window + more,
            "norm": norm,
            "optimizer": times.optimizer + optimizer,
            "data": times.data + max(0.0, more - norm - optimizer - between),
            "gc": times.gc + between,
        }
        return times.model_copy(update=update)

    def close(self) -> None:
        """Remove the hooks of optimizers. Idempotent."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def _add(self, part: WindowPart, seconds: float) -> None:
        self._parts[part] = self._parts.get(part, 0.0) + seconds

    def _count_new_pauses(self) -> float:
        return self.count_paused() - self._began_paused

    def _begin_optimizer(self, *_: Any) -> None:
        self._optimizer_began, self._optimizer_paused = self._clock(), self.count_paused()

    def _end_optimizer(self, *_: Any) -> None:
        paused = self.count_paused() - self._optimizer_paused
        self._add("optimizer", self._clock() - self._optimizer_began - paused)
