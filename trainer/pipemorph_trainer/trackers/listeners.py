"""Calls what the script gave as ``on_iteration``, beside training.

A tracker may write to a disk or wait for a server. So it is called in a thread of its own, and the
iteration pays for an entry in a queue. An error there ends no training.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipemorph.errors import InputError
from pipemorph.wire import IterationSample
from pipemorph_trainer.agent.rank_plan import RankPlan
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.trackers.finished import FinishedIteration, PlanChange
from pipemorph_trainer.trackers.kubeflow import TrainJobStatus

log = logging.getLogger("pipemorph.trackers")

OnIteration = Callable[[FinishedIteration], object]

MOST_WAITING = 1024
"""Iterations that wait for slow listeners before later ones are left out."""
LAST_SECONDS, FAILED_SECONDS = 10.0, 1.0
"""How long the end of training waits for listeners, and that of a rank that failed."""


def chosen(given: OnIteration | Sequence[OnIteration] | None) -> tuple[OnIteration, ...]:
    """What to call for each iteration. Raises :class:`InputError` unless it can be called."""
    if given is None:
        return ()
    several = given if isinstance(given, Sequence) else [given]
    for each in several:
        if not callable(each):
            raise InputError(
                f"on_iteration is {each!r}; expected a function of one"
                " pipemorph_trainer.trackers.FinishedIteration, or a list of such functions"
            )
    return tuple(several)


class Listeners:
    """Calls ``listeners`` for each iteration, in the order in which rank 0 hears of them. Main
    thread, but for the calls.

    ``version``: of the plan at the start. ``total``: iterations of the job, if there is one.
    """

    def __init__(
        self, listeners: Sequence[OnIteration], *, version: int = 0, total: int | None = None
    ) -> None:
        self._listeners, self._version, self._total = tuple(listeners), version, total
        self.any = bool(listeners)
        """Whether there are some."""
        self._plans: dict[int, RankPlan] = {}
        """Newer ones that have come, by version."""
        self._waiting: queue.SimpleQueue[FinishedIteration | None] = queue.SimpleQueue()
        self._left_out = 0
        self._failures: dict[str, int] = {}
        self._thread: threading.Thread | None = None

    @staticmethod
    def of(
        listeners: Sequence[OnIteration],
        context: TrainerContext,
        *,
        version: int,
        environ: Mapping[str, str] = os.environ,
    ) -> Listeners:
        """Those of a rank: rank 0 calls the script's, and Kubeflow Trainer's if it wants to be
        told of progress."""
        if context.rank != 0:
            return Listeners(())
        status = TrainJobStatus.from_env(environ)
        total = context.job.spec.trainer.iterations if context.job is not None else None
        own = () if status is None else (status,)
        return Listeners((*listeners, *own), version=version, total=total)

    def heard(self, plan: RankPlan) -> None:
        """A plan has come, which may be committed."""
        if self._listeners:
            self._plans[plan.version] = plan

    def finished(self, sample: IterationSample) -> None:
        """Tell of an iteration. Does not wait."""
        if not self._listeners:
            return
        if self._waiting.qsize() >= MOST_WAITING:
            if not self._left_out:
                log.warning(
                    "on_iteration is %d iterations behind; from iteration %d on some are left out",
                    MOST_WAITING, sample.index,
                )  # fmt: skip
            self._left_out += 1
            return
        if self._thread is None:
            # The interpreter ends without it, should nobody close the pipeline.
            self._thread = threading.Thread(target=self._call, name="on_iteration", daemon=True)
            self._thread.start()
        self._waiting.put(
            FinishedIteration(
                index=sample.index,
                seconds=sample.seconds,
                loss=sample.loss,
                bubble_fraction=sample.bubble_fraction,
                plan_version=sample.plan_version,
                change=self._change(sample.plan_version),
                total=self._total,
            )
        )

    def close(self, *, failed: bool = False, most: float = LAST_SECONDS) -> None:
        """Wait for the calls, within a limit and at most so many seconds, and say what was left
        out. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._waiting.put(None)
        seconds = min(most, FAILED_SECONDS if failed else LAST_SECONDS)
        thread.join(seconds)
        if thread.is_alive():
            log.warning(
                "on_iteration has not returned within %g s of the end; up to %d iterations are "
                "missing there",
                seconds, self._waiting.qsize(),
            )  # fmt: skip
        for name, count in list(self._failures.items()):  # it may still be called
            log.warning("on_iteration: %s failed for %d iterations", name, count)
        if self._left_out:
            log.warning("on_iteration: %d iterations were left out", self._left_out)
        self._listeners = ()

    def _change(self, version: int) -> PlanChange | None:
        if version <= self._version:
            return None
        before, self._version = self._version, version
        plan = self._plans.get(version)
        self._plans = {v: each for v, each in self._plans.items() if v > version}
        if plan is None:
            return PlanChange(before, version)
        return PlanChange(before, version, plan.reason, plan.promised)

    def _call(self) -> None:
        listeners, waiting = self._listeners, self._waiting
        while (finished := waiting.get()) is not None:
            for each in listeners:
                try:
                    each(finished)
                except (Exception, SystemExit) as error:  # noqa: BLE001  not worth the training
                    self._failed(_name(each), finished, error)

    def _failed(self, name: str, finished: FinishedIteration, error: BaseException) -> None:
        if name not in self._failures:
            last = traceback.format_exception_only(error)[-1].strip()
            log.warning(
                "on_iteration: %s failed for iteration %d: %s; training goes on, and it is called "
                "for later ones, without another warning",
                name, finished.index, last,
            )  # fmt: skip
        self._failures[name] = self._failures.get(name, 0) + 1


def _name(listener: Any) -> str:
    return getattr(listener, "__qualname__", type(listener).__name__)
