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
    the pipeline. ``clock``: monotonic, seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._parts: dict[str, float] = {}
        self._began = clock()
        self._optimizer_began = 0.0
        self._hooks = [
            register_optimizer_step_pre_hook(self._begin_optimizer),
            register_optimizer_step_post_hook(self._end_optimizer),
        ]

    @contextmanager
    def measure_part(self, part: WindowPart) -> Iterator[None]:
        """Context whose time is that of a part."""
        began = self._clock()
        try:
            yield
        finally:
            self._add(part, self._clock() - began)

    def begin_step(self) -> None:
        """Begin a step: the script's time is over."""
        spent = self._clock() - self._began - sum(self._parts.values())
        self._add("data", max(0.0, spent))

    def restart(self) -> None:
        """Begin another window, after a call that is no step."""
        self._parts, self._began = {}, self._clock()

    def end_window(self, *, paused: float = 0.0, **more: Any) -> RankTimes:
        """End the window with its step, and begin the next one. ``paused``: seconds of it in which
        the garbage collector paused the script. ``more``: other fields."""
        now, parts = self._clock(), self._parts
        window = now - self._began
        if "data" in parts:
            parts["data"] = max(0.0, parts["data"] - paused)
        self._parts, self._began = {}, now
        measured: dict[str, Any] = {**parts} | more
        return RankTimes(window=window, gc=paused, **measured)

    def extend_window(self, times: RankTimes, norm: float) -> RankTimes:
        """Extend a window that has just ended by the gradient norm, at whose end all ranks are
        together. Returns its times. ``norm``: seconds in it."""
        now, parts = self._clock(), self._parts
        more, optimizer = now - self._began, parts.get("optimizer", 0.0)
        self._parts, self._began = {}, now
        update = {
            "window": times.window + more,
            "norm": norm,
            "optimizer": times.optimizer + optimizer,
            "data": times.data + max(0.0, more - norm - optimizer),
        }
        return times.model_copy(update=update)

    def close(self) -> None:
        """Remove the hooks of optimizers. Idempotent."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def _add(self, part: WindowPart, seconds: float) -> None:
        self._parts[part] = self._parts.get(part, 0.0) + seconds

    def _begin_optimizer(self, *_: Any) -> None:
        self._optimizer_began = self._clock()

    def _end_optimizer(self, *_: Any) -> None:
        self._add("optimizer", self._clock() - self._optimizer_began)
