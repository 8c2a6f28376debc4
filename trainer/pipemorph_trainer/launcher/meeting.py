"""A pod's talk with the ingest about generations: says when its ranks have ended, hears when those
of other pods have, and waits for the next generation."""

from __future__ import annotations

import http.client
import json
import logging
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlencode, urlsplit

from pydantic import ValidationError

from pipemorph.errors import InputError, one_line
from pipemorph.local.processes.supervise import Told
from pipemorph.wire import MAX_WAIT_SECONDS, GenerationState, Loss, PodReport, ResumedFrom
from pipemorph.wire.generations import LONGEST_LINE

log = logging.getLogger("pipemorph.launcher")

POLL_SECONDS = min(25.0, MAX_WAIT_SECONDS)
MEET_POLL_SECONDS = 5.0
"""Shorter: an ingest that is replaced meanwhile has to hear again that this pod waits."""
REQUEST_SECONDS = 5.0
FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS = 0.1, 5.0
LAST_MEET_BACKOFF_SECONDS = 1.0
SAY_PAUSES = (0.2, 1.0, 2.0, 4.0, 0.0)
"""Seconds after each try to say what others wait for, or what nobody says again."""
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


class Refused(Exception):
    """The ingest does not take this pod's word."""


_NO_ANSWER = (OSError, http.client.HTTPException, ValueError)


@dataclass
class Endpoint:
    """Where the ingest answers launchers of the job, and how they prove to be some. For any thread.

    ``base`` is the address of the Service, which leads to the leader.
    """

    base: SplitResult
    path: str
    token_file: Path | None
    authority: str | None
    """PEM file with the authority of the ingest's certificate; None: the system's."""

    @staticmethod
    def from_env(environ: Mapping[str, str], namespace: str, job: str) -> Endpoint:
        """Raises :class:`InputError` if the operator's variable is missing."""
        text = environ.get("PIPEMORPH_INGEST_URL", "")
        try:
            base = urlsplit(text.rstrip("/"))
            known = base.scheme in ("http", "https") and base.hostname and base.port != 0
        except ValueError:
            known = False
        if not known:
            raise InputError(
                f"PIPEMORPH_INGEST_URL is {one_line(text)!r}; expected http(s)://HOST:PORT"
            )
        token = environ.get("PIPEMORPH_TOKEN_FILE")
        return Endpoint(
            base,
            f"{base.path}/v1/jobs/{namespace}/{job}/generation",
            Path(token) if token else None,
            environ.get("PIPEMORPH_CA_FILE") or None,
        )

    def ask(self, query: Mapping[str, str], body: bytes | None, seconds: float) -> GenerationState:
        """One request: POST with a ``body``, else GET. Raises OSError, ValueError or
        http.client.HTTPException if there is no answer, and :class:`Refused`."""
        status, said = self._request(query, body, seconds)
        if status == HTTPStatus.OK:
            try:
                return GenerationState.model_validate_json(said)
            except ValidationError as error:
                raise Refused(f"its answer is of another release: {one_line(str(error))}") from None
        why = f"the ingest answered {status}: {_reason(said)}"
        if status in FINAL:
            raise Refused(why)
        raise OSError(why)

    def _request(
        self, query: Mapping[str, str], body: bytes | None, seconds: float
    ) -> tuple[int, bytes]:
        """The status and the body of an answer. Without proxies, as the agent."""
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.token_file is not None:
            # Projected tokens are renewed in place.
            headers["Authorization"] = f"Bearer {self.token_file.read_text().strip()}"
        connection = self._connection(seconds)
        try:
            where = f"{self.path}?{urlencode(query)}"
            connection.request("GET" if body is None else "POST", where, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(MOST_ANSWER_BYTES)
        finally:
            connection.close()

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        name = self.base.hostname or ""
        if self.base.scheme == "http":
            return http.client.HTTPConnection(name, self.base.port, timeout=seconds)
        trust = ssl.create_default_context(cafile=self.authority)
        return http.client.HTTPSConnection(name, self.base.port, context=trust, timeout=seconds)


def _reason(said: bytes) -> str:
    try:
        return one_line(str(json.loads(said)["error"]))
    except (ValueError, TypeError, KeyError):
        return "without a reason"


class Meeting:
    """What the pod number ``pod`` of an attempt tells and hears. Its threads end with the process.

    ``note`` is told when the ingest does not answer, and does again. ``runs``: whether a generation
    has ranks in this pod.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        pod: int,
        attempt: int,
        note: Callable[[str], None],
        runs: Callable[[GenerationState], bool] = lambda _: True,
    ) -> None:
        self._endpoint, self._pod, self._attempt, self._note = endpoint, pod, attempt, note
        self.url = endpoint.base.geturl()
        """Where an ingest is asked."""
        self._runs = runs
        self.missed = False
        """Whether a generation ran without this pod: its copies are not of the newest state."""
        self._told = GenerationState(attempt=attempt, generation=0)
        """What this pod was told last."""
        self._leaving: tuple[int, tuple[int, ...]] | None = None
        """A generation whose ranks are to leave, and for which layers."""
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

    def leaves(self, generation: int) -> tuple[int, ...] | None:
        """Whether the ranks have to leave at an iteration boundary: for these layers of all stages,
        or, if there are none, since a replica can join. None: they have not."""
        with self._changed:
            return self._asked_of(generation)

    def _asked_of(self, generation: int | None) -> tuple[int, ...] | None:
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
            left_for = (self._asked_of(generation) or ()) if left else None
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
        end, backoff = time.monotonic() + patience, FIRST_BACKOFF_SECONDS
        why, tell_at = "the ingest has not answered", time.monotonic() + TELL_SECONDS
        while (left := end - time.monotonic()) > 0 and not cancelled.is_set():
            try:
                state = self._ask({}, self._report(0, "joined"), REQUEST_SECONDS)
            except (*_NO_ANSWER, Refused) as error:
                # Refused: the ingest may learn of this pod later than the pod begins.
                why = one_line(str(error))
                if time.monotonic() >= tell_at:
                    told = f"no ingest knows this pod: {why}; asking again for {left:.0f} s"
                    self._note(told.replace("inf s", "ever"))
                    tell_at = inf
                cancelled.wait(min(backoff, left))
                backoff = min(2 * backoff, LAST_MEET_BACKOFF_SECONDS)
                continue
            self._told = state
            if state.verdict or not (state.over and self._runs(state)):
                return state
            self._note(f"waiting for the generation after {state.generation}: {state.reason}")
            return self._wait(state.generation, {}, 0, meets, cancelled)
        return f"no ingest knows this pod: {why} (waited {patience:.0f} s)"

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
        why, backoff = "the ingest has not answered", FIRST_BACKOFF_SECONDS
        told = False
        while (left := end - time.monotonic()) > 0 and not cancelled.is_set():
            wait = max(0.0, min(MEET_POLL_SECONDS, left))
            report = self._report(generation, "gone", finished=finished, **gone)
            try:
                state = self._ask({"wait": f"{wait:.3f}"}, report, wait + REQUEST_SECONDS)
            except Refused as refusal:
                return f"the ingest refuses this pod: {refusal}"
            except _NO_ANSWER as error:
                why = f"no ingest has answered: {one_line(str(error))}"
                if not told:
                    self._note(f"{why}; asking again for {left:.0f} s".replace("inf s", "ever"))
                    told = True
                cancelled.wait(min(backoff, left))
                backoff = min(2 * backoff, LAST_MEET_BACKOFF_SECONDS)
                continue
            backoff = FIRST_BACKOFF_SECONDS
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
        backoff = FIRST_BACKOFF_SECONDS
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
                state = self._ask(query, None, POLL_SECONDS + REQUEST_SECONDS)
            except Refused as refusal:
                # This pod is about to be ended, or cannot recover: its ranks tell.
                log.warning("generations: %s", refusal)
                self._pause(generation, LAST_BACKOFF_SECONDS)
                continue
            except _NO_ANSWER as error:
                log.info("generations: no ingest answers: %s", error)
                self._pause(generation, backoff)
                backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)
                continue
            backoff = FIRST_BACKOFF_SECONDS
            if state.generation > generation or state.over:
                with self._changed:
                    why = state.reason or "another pod's ranks have ended"
                    self._over = generation, Told(why, state.hang)
                    if self._watched == generation:
                        self._watched = None
                continue
            with self._changed:
                same = state.generation == generation and state.layers == self._told.layers
                if same and self._watched == generation:
                    # Layers may count since, as another ingest has to hear if it was not written.
                    self._told = state
            if state.leave != (self._asked_of(generation) is not None):
                with self._changed:
                    self._leaving = (generation, state.leave_layers) if state.leave else None
            elif state.again:
                self._pause(generation, state.again)

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
        why = "the wait was interrupted"
        for pause in SAY_PAUSES:
            if cancelled.is_set():
                break
            try:
                self._ask({}, report, REQUEST_SECONDS)
                return ""
            except Refused as refusal:
                log.warning("the ingest was not told (%s): %s", report.event, refusal)
                return str(refusal)
            except _NO_ANSWER as error:
                why = one_line(str(error))
                log.info("the ingest was not told (%s): %s", report.event, why)
                cancelled.wait(pause)
        return why

    def _ask(
        self, query: Mapping[str, str], report: PodReport | None, seconds: float
    ) -> GenerationState:
        body = report.body() if report is not None else None
        whole = query if report is not None else {"attempt": str(self._attempt), **query}
        return self._endpoint.ask(whole, body, seconds)

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
                "places": self._told.places,
                "layers": self._told.layers,
                "layers_before": self._told.layers_before,
                **fields,
            }
        )
