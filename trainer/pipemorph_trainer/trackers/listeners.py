"""Calls the script's ``on_iteration`` functions, concurrently to training.

A tracker may write to a disk or wait for a server. So it is called in a separate thread, and an
iteration only pays for an entry in a queue. An error there does not end training.
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
from pipemorph.protocol import IterationSample
from pipemorph_trainer.agent.rank_plan import RankPlan
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.trackers.finished_iteration import FinishedIteration, PlanChange
from pipemorph_trainer.trackers.kubeflow import TrainJobStatus

log = logging.getLogger("pipemorph.trackers")

OnIteration = Callable[[FinishedIteration], object]

MOST_WAITING = 1024
"""Most iterations that wait for slow listeners; later ones are skipped."""
CLOSE_SECONDS, FAILED_SECONDS = 10.0, 1.0
"""Timeouts for listeners at the end of training, and after a failure."""


def check_listeners(given: OnIteration | Sequence[OnIteration] | None) -> tuple[OnIteration, ...]:
    """List the functions to call for each iteration. Raises :class:`InputError` if one is none."""
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


class IterationListeners:
    """Calls ``listeners`` for each iteration, in order, in a separate thread. Its own methods are
    called in the main thread.

    ``version``: version of the plan at the start. ``total``: iterations of the job, if there is
    one.
    """

    def __init__(
        self, listeners: Sequence[OnIteration], *, version: int = 0, total: int | None = None
    ) -> None:
        self._listeners, self._version, self._total = tuple(listeners), version, total
        self.any = bool(listeners)
        """True if there are listeners."""
        self._plans: dict[int, RankPlan] = {}
        """Newer plans that have arrived, by version."""
        self._waiting: queue.SimpleQueue[FinishedIteration | None] = queue.SimpleQueue()
        self._skipped = 0
        self._failures: dict[str, int] = {}
        self._thread: threading.Thread | None = None

    @staticmethod
    def create_for_rank(
        listeners: Sequence[OnIteration],
        context: TrainerContext,
        *,
        version: int,
        environ: Mapping[str, str] = os.environ,
    ) -> IterationListeners:
        """Create the listeners of a rank: on rank 0 those of the script, and Kubeflow Trainer's if
        it requests progress."""
        if context.rank != 0:
            return IterationListeners(())
        status = TrainJobStatus.from_env(environ)
        total = context.job.spec.trainer.iterations if context.job is not None else None
        own = () if status is None else (status,)
        return IterationListeners((*listeners, *own), version=version, total=total)

    def record_plan(self, plan: RankPlan) -> None:
        """Record a plan that has arrived and may be committed."""
        if self._listeners:
            self._plans[plan.version] = plan

    def publish_iteration(self, sample: IterationSample) -> None:
        """Queue an iteration for the listeners. Does not wait."""
        if not self._listeners:
            return
        if self._waiting.qsize() >= MOST_WAITING:
            if not self._skipped:
                log.warning(
                    "on_iteration is %d iterations behind; from iteration %d on some are skipped",
                    MOST_WAITING, sample.index,
                )  # fmt: skip
            self._skipped += 1
            return
        if self._thread is None:
            # A daemon, so that the interpreter can end if the pipeline is not closed.
            self._thread = threading.Thread(
                target=self._call_listeners, name="on_iteration", daemon=True
            )
            self._thread.start()
        self._waiting.put(
            FinishedIteration(
                index=sample.index,
                seconds=sample.seconds,
                loss=sample.loss,
                bubble_fraction=sample.bubble_fraction,
                plan_version=sample.plan_version,
                change=self._find_plan_change(sample.plan_version),
                total=self._total,
            )
        )

    def close(self, *, failed: bool = False, most: float = CLOSE_SECONDS) -> None:
        """Wait for the calls and warn of skipped iterations and failures. Idempotent.

        The wait takes at most ``most`` seconds, and at most :data:`CLOSE_SECONDS`, or
        :data:`FAILED_SECONDS` if training ``failed``.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._waiting.put(None)
        seconds = min(most, FAILED_SECONDS if failed else CLOSE_SECONDS)
        thread.join(seconds)
        if thread.is_alive():
            log.warning(
                "on_iteration has not returned within %g s of the end; up to %d iterations are "
                "missing there",
                seconds, self._waiting.qsize(),
            )  # fmt: skip
        for name, count in list(self._failures.items()):  # it may still be called
            log.warning("on_iteration: %s failed for %d iterations", name, count)
        if self._skipped:
            log.warning("on_iteration: %d iterations were skipped", self._skipped)
        self._listeners = ()

    def _find_plan_change(self, version: int) -> PlanChange | None:
        """Describe the change if an iteration is the first under a newer plan."""
        if version <= self._version:
            return None
        before, self._version = self._version, version
        plan = self._plans.get(version)
        self._plans = {v: each for v, each in self._plans.items() if v > version}
        if plan is None:
            return PlanChange(before, version)
        return PlanChange(before, version, plan.reason, plan.promised)

    def _call_listeners(self) -> None:
        listeners, waiting = self._listeners, self._waiting
        while (finished := waiting.get()) is not None:
            for each in listeners:
                try:
                    each(finished)
                except (Exception, SystemExit) as error:  # noqa: BLE001  not worth the training
                    self._record_failure(_get_name(each), finished, error)

    def _record_failure(self, name: str, finished: FinishedIteration, error: BaseException) -> None:
        if name not in self._failures:
            last = traceback.format_exception_only(error)[-1].strip()
            log.warning(
                "on_iteration: %s failed for iteration %d: %s; training goes on, and it is called "
                "for later ones, without another warning",
                name, finished.index, last,
            )  # fmt: skip
        self._failures[name] = self._failures.get(name, 0) + 1


def _get_name(listener: Any) -> str:
    return getattr(listener, "__qualname__", type(listener).__name__)
