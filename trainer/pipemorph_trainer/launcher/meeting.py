"""A pod's talk with the ingest about generations: says when its ranks have ended, hears when those
of other pods have, and waits for the next generation."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from math import inf
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from tenacity import Retrying

from pipemorph.api.layout import RankLayout
from pipemorph.errors import PipeMorphError, one_line
from pipemorph.http_client import HttpClient, NoAnswer, checked_url, retries
from pipemorph.local.processes.supervise import Told
from pipemorph.wire import MAX_WAIT_SECONDS, GenerationState, Loss, PodReport, ResumedFrom
from pipemorph.wire.generations import LONGEST_LINE

log = logging.getLogger("pipemorph.launcher")

POLL_SECONDS = min(25.0, MAX_WAIT_SECONDS)
MEET_POLL_SECONDS = 5.0
"""Shorter: an ingest that is replaced meanwhile has to hear again that this pod waits."""
REQUEST_SECONDS = 5.0
LONGEST_PAUSE_SECONDS, LONGEST_POLL_PAUSE_SECONDS = 1.0, 5.0
SAY_SECONDS, LONGEST_SAY_PAUSE_SECONDS = 7.0, 4.0
"""How long to try to say what others wait for, or what nobody says again."""
LOOK_SECONDS = 0.05
TELL_SECONDS = 5.0
"""How long an ingest may need to learn of a pod that has begun, before its log says so."""
MOST_ANSWER_BYTES = 1 << 16
FINAL = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.UNPROCESSABLE_ENTITY,
    }
)
"""Answers that another try does not change: this pod does not belong to the attempt in progress."""


class Refused(PipeMorphError):
    """The ingest does not take this pod's word."""


def ingest_client(environ: Mapping[str, str], namespace: str, job: str) -> HttpClient:
    """Client of the job's generations, at the Service that leads to the leader of the ingest.

    Raises :class:`InputError` if the operator's variable is missing.
    """
    name = "PIPEMORPH_INGEST_URL"
    base = checked_url(environ.get(name, ""), name)
    token = environ.get("PIPEMORPH_TOKEN_FILE")
    return HttpClient(
        f"{base}/v1/jobs/{namespace}/{job}/generation",
        Path(token) if token else None,
        environ.get("PIPEMORPH_CA_FILE") or None,
    )


class Meeting:
    """What the pod number ``pod`` of an attempt tells and hears. Its threads end with the process.

    ``note`` is told when the ingest does not answer, and does again. ``runs``: whether a generation
    has ranks in this pod.
    """

    def __init__(
        self,
        client: HttpClient,
        pod: int,
        attempt: int,
        note: Callable[[str], None],
        runs: Callable[[GenerationState], bool] = lambda _: True,
    ) -> None:
        self._client, self._pod, self._attempt, self._note = client, pod, attempt, note
        self.url = client.base.partition("/v1/")[0]
        """Where an ingest is asked."""
        self._runs = runs
        self.missed = False
        """Whether a generation ran without this pod: its copies are not of the newest state."""
        self._told = GenerationState(attempt=attempt, generation=0)
        """What this pod was told last."""
        self._leaving: tuple[int, RankLayout] | None = None
        """A generation whose ranks are to leave, and for which layout."""
        self._launcher = secrets.token_hex(8)
        self._changed = threading.Condition()
        self._watched: int | None = None
        """The generation that runs here; None: none does."""
        self._over: tuple[int, Told] | None = None
        """A generation that is over, and why."""
        threading.Thread(target=self._watch, name="generations", daemon=True).start()

    def watch(self, generation: int) -> None:
        """The ranks of ``generation`` run here: hear from now on whether it is over."""
        with self._changed:
            self._watched = generation
            self._changed.notify()

    def over(self, generation: int) -> Told | None:
        """Why the ranks have to end, if the ingest has said so."""
        with self._changed:
            if self._over is not None and self._over[0] >= generation:
                return self._over[1]
        return None

    def leaves(self, generation: int) -> RankLayout | None:
        """Whether the ranks have to leave at an iteration boundary: for this layout, or, if it is
        empty, since a replica can join. None: they have not."""
        with self._changed:
            return self._asked_of(generation)

    def _asked_of(self, generation: int | None) -> RankLayout | None:
        leaving = self._leaving
        return leaving[1] if leaving is not None and leaving[0] == generation else None

    def failed(self, generation: int, loss: Loss) -> None:
        """Say at once, beside the caller, that the ranks of this pod are about to end."""
        self._say(self._report(generation, "failed", loss=loss))

    def resumed(self, generation: int, word: ResumedFrom) -> None:
        """Say, beside the caller, what the ranks have begun with."""
        self._say(self._report(generation, "resumed", resumed=word))

    def stays(self, generation: int, why: str) -> None:
        """Say, beside the caller, that the ranks could not leave."""
        with self._changed:
            if self._asked_of(generation) is not None:
                self._leaving = None
        self._say(self._report(generation, "stays", why=why))

    def completed(self, generation: int, stop: Callable[[], bool]) -> None:
        """Say that all ranks of this pod have finished, so that nobody waits for them. Tries again
        for some seconds, or until ``stop()``: pods of replicas that are left out wait for it."""
        report = self._report(generation, "completed")
        self._interruptibly(lambda cancelled: self._insist(report, cancelled), stop)

    def join(
        self, patience: float, stop: Callable[[], bool], *, meets: float | None = None
    ) -> GenerationState | str:
        """Say that this launcher has begun, and wait for the generation that it is to start: the
        first one at once, or one to come if this pod takes the place of another. Does not wait if
        the newest one is without this pod: call :meth:`meet` when it can start ranks. Waits at most
        ``patience`` seconds for an ingest, then as :meth:`meet` with ``meets``, by default as many,
        or until ``stop()``. Returns as :meth:`meet`."""
        met = patience if meets is None else meets
        return self._interruptibly(lambda cancelled: self._join(patience, met, cancelled), stop)

    def meet(
        self,
        generation: int,
        loss: Loss | None,
        patience: float,
        stop: Callable[[], bool],
        *,
        finished: int = 0,
        reached: int = 0,
        began: int = 0,
        left: bool = False,
    ) -> GenerationState | str:
        """Say that no rank of ``generation`` is left here, and wait until those of all pods are
        gone, at most ``patience`` seconds or until ``stop()``. ``finished``: iterations that ranks
        of this pod have, ``reached``: those of this generation, and ``began``: those of them that
        it began with; ``left``: they have left, as all have. Returns a state that names the
        generation to start, or has a verdict; or why there is none."""
        with self._changed:
            self._watched = None
            left_for = (self._asked_of(generation) or RankLayout()) if left else None
        gone = {"loss": loss, "reached": reached, "began": began, "left_for": left_for}
        return self._interruptibly(
            lambda cancelled: self._wait(generation, gone, finished, patience, cancelled), stop
        )

    @staticmethod
    def _interruptibly(
        wait: Callable[[threading.Event], GenerationState | str], stop: Callable[[], bool]
    ) -> GenerationState | str:
        found: list[GenerationState | str] = []
        cancelled = threading.Event()
        waiting = threading.Thread(
            target=lambda: found.append(wait(cancelled)), name="meeting", daemon=True
        )
        waiting.start()
        while waiting.is_alive() and not stop():
            waiting.join(LOOK_SECONDS)
        cancelled.set()
        return found[0] if found else "the wait was interrupted"

    def _join(
        self, patience: float, meets: float, cancelled: threading.Event
    ) -> GenerationState | str:
        end, tell_at = time.monotonic() + patience, time.monotonic() + TELL_SECONDS

        def tell(error: BaseException, _: float) -> None:
            nonlocal tell_at
            if time.monotonic() >= tell_at:
                self._note(f"no ingest knows this pod: {error}; {_again(end)}")
                tell_at = inf

        # Refused: the ingest may learn of this pod later than the pod begins.
        policy = retries(
            seconds=patience, longest_pause=LONGEST_PAUSE_SECONDS, stopped=cancelled.is_set,
            sleep=cancelled.wait, on=(NoAnswer, Refused), before=tell,
        )  # fmt: skip
        try:
            state = Retrying(**policy)(self._ask, {}, self._report(0, "joined"), REQUEST_SECONDS)
        except (NoAnswer, Refused) as error:
            return f"no ingest knows this pod: {error} (waited {patience:.0f} s)"
        self._told = state
        if state.verdict or not (state.over and self._runs(state)):
            return state
        self._note(f"waiting for the generation after {state.generation}: {state.reason}")
        return self._wait(state.generation, {}, 0, meets, cancelled)

    def _wait(
        self,
        generation: int,
        gone: Mapping[str, Any],
        finished: int,
        patience: float,
        cancelled: threading.Event,
    ) -> GenerationState | str:
        """``gone``: how the ranks of ``generation`` have ended."""
        end = time.monotonic() + patience
        why, told = "the ingest has not answered", False

        def ask() -> GenerationState:
            wait = max(0.0, min(MEET_POLL_SECONDS, end - time.monotonic()))
            report = self._report(generation, "gone", finished=finished, **gone)
            return self._ask({"wait": f"{wait:.3f}"}, report, wait + REQUEST_SECONDS)

        def tell(error: BaseException, _: float) -> None:
            nonlocal told
            if not told:
                self._note(f"no ingest has answered: {error}; {_again(end)}")
                told = True

        while (left := end - time.monotonic()) > 0 and not cancelled.is_set():
            policy = retries(
                seconds=None if left == inf else left, longest_pause=LONGEST_PAUSE_SECONDS,
                stopped=cancelled.is_set, sleep=cancelled.wait, before=tell,
            )  # fmt: skip
            try:
                state = Retrying(**policy)(ask)
            except Refused as refusal:
                return f"the ingest refuses this pod: {refusal}"
            except NoAnswer as error:
                why = f"no ingest has answered: {error}"
                continue
            why = f"other pods have not ended their ranks of generation {generation}"
            if state.awaits is not None:
                why = f"no other pod has come in the place of pod {state.awaits}"
                end = time.monotonic() + patience
            # A generation does not follow one that this pod has not heard of, unless that ran
            # without it.
            self.missed |= state.generation > generation + 1
            self._told, runs = state, self._runs(state)
            if state.verdict or (state.generation > generation and not state.over and runs):
                return state
            if not runs:
                self._tell_once(state)
                self.missed, why = True, "the others train on without this pod"
                end = inf  # There is nothing else to do, whether an ingest answers or not.
            elif end == inf:
                end = time.monotonic() + patience
            if state.generation > generation:
                # It was over before this pod heard of it, or has no ranks here.
                generation, gone = state.generation, {}
            else:
                cancelled.wait(state.again)
        return f"{why} (waited {patience:.0f} s)"

    def _tell_once(self, state: GenerationState) -> None:
        if not self.missed and not state.over:
            without = ", ".join(map(str, state.left_out))
            self._note(
                f"generation {state.generation} runs without"
                + (f" replicas {without}" if without else " this pod")
                + "; this pod waits until it is needed"
            )

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._watched is not None)
                generation = self._watched
            assert generation is not None
            query = {
                "generation": str(generation),
                "pod": str(self._pod),
                "wait": str(POLL_SECONDS),
            }
            if self._asked_of(generation) is not None:
                query["leaving"] = "1"
            try:
                state = self._polling(generation)(
                    self._ask, query, None, POLL_SECONDS + REQUEST_SECONDS
                )
            except (NoAnswer, Refused):
                continue  # Another generation runs meanwhile.
            if state.generation > generation or state.over:
                with self._changed:
                    why = state.reason or "another pod's ranks have ended"
                    self._over = generation, Told(why, state.hang)
                    if self._watched == generation:
                        self._watched = None
                continue
            with self._changed:
                same = state.generation == generation and state.layout == self._told.layout
                if same and self._watched == generation:
                    # It may count since, as another ingest has to hear if it was not written.
                    self._told = state
            if state.leave != (self._asked_of(generation) is not None):
                with self._changed:
                    self._leaving = (generation, state.leave_for) if state.leave else None
            elif state.again:
                self._pause(generation, state.again)

    def _polling(self, generation: int) -> Retrying:
        """Tries as long as no other generation runs here."""

        def tell(error: BaseException, _: float) -> None:
            # Refused: this pod is about to be ended, or cannot recover: its ranks tell.
            level = logging.WARNING if isinstance(error, Refused) else logging.INFO
            log.log(level, "generations: %s", error)

        policy = retries(
            longest_pause=LONGEST_POLL_PAUSE_SECONDS, on=(NoAnswer, Refused), before=tell,
            stopped=lambda: self._watched not in (None, generation),
            sleep=lambda seconds: self._pause(generation, seconds),
        )  # fmt: skip
        return Retrying(**policy)

    def _pause(self, generation: int, seconds: float) -> None:
        """Wait, unless another generation runs meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._watched not in (None, generation), seconds)

    def _say(self, report: PodReport) -> None:
        threading.Thread(
            target=self._insist, args=(report, threading.Event()), name=report.event, daemon=True
        ).start()

    def _insist(self, report: PodReport, cancelled: threading.Event) -> str:
        """Say something until it is heard. Returns why it was not; empty if it was."""
        policy = retries(
            seconds=SAY_SECONDS, longest_pause=LONGEST_SAY_PAUSE_SECONDS,
            stopped=cancelled.is_set, sleep=cancelled.wait,
        )  # fmt: skip
        try:
            Retrying(**policy)(self._ask, {}, report, REQUEST_SECONDS)
        except (NoAnswer, Refused) as error:
            log.warning("the ingest was not told (%s): %s", report.event, error)
            return str(error)
        return ""

    def _ask(
        self, query: Mapping[str, str], report: PodReport | None, seconds: float
    ) -> GenerationState:
        """The ingest's state. Raises :class:`NoAnswer` and :class:`Refused`."""
        body = report.body() if report is not None else None
        whole = query if report is not None else {"attempt": str(self._attempt), **query}
        answer = self._client.ask(
            query=whole, body=body, seconds=seconds, most_bytes=MOST_ANSWER_BYTES
        )
        if answer.status in FINAL:
            raise Refused(str(answer.failed()))
        if answer.status != HTTPStatus.OK:
            raise answer.failed()
        try:
            return GenerationState.model_validate_json(answer.body)
        except ValidationError as error:
            raise Refused(f"its answer is of another release: {one_line(str(error))}") from None

    def _report(self, generation: int, event: str, *, why: str = "", **fields: Any) -> PodReport:
        return PodReport.model_validate(
            {
                "attempt": self._attempt,
                "generation": generation,
                "pod": self._pod,
                "launcher": self._launcher,
                "event": event,
                "why": why[:LONGEST_LINE],
                "left_out": self._told.left_out,
                "layout": self._told.layout,
                "layout_before": self._told.layout_before,
                **fields,
            }
        )


def _again(end: float) -> str:
    return f"asking again for {max(0.0, end - time.monotonic()):.0f} s".replace("inf s", "ever")
