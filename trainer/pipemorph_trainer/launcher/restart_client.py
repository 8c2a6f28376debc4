"""Client of a pod for restarts: reports to the ingest when the pod's ranks have ended, learns when
those of other pods have, and waits for the next generation."""

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

from pipemorph.errors import PipeMorphError, one_line
from pipemorph.http_client import HttpClient, NoResponseError, make_retry_options, validate_url
from pipemorph.local.processes.supervision import ShutdownReason
from pipemorph.protocol import MAX_WAIT_SECONDS, GenerationState, PodFailure, PodReport, ResumedFrom
from pipemorph.protocol.generation_messages import LONGEST_LINE
from pipemorph.spec.layout import RankLayout

log = logging.getLogger("pipemorph.launcher")

POLL_SECONDS = min(25.0, MAX_WAIT_SECONDS)
NEXT_GENERATION_POLL_SECONDS = 5.0
"""Interval at which a waiting pod reports again, since the ingest may have been replaced."""
REQUEST_SECONDS = 5.0
LONGEST_PAUSE_SECONDS, LONGEST_POLL_PAUSE_SECONDS = 1.0, 5.0
SEND_SECONDS, LONGEST_SEND_PAUSE_SECONDS = 7.0, 4.0
"""Time limit and longest pause for reports that others wait for, or that are sent only once."""
CHECK_INTERVAL_SECONDS = 0.05
FIRST_ANSWER_SECONDS = 5.0
"""Time for the ingest to learn of a new pod before the pod logs the refusals."""
MOST_ANSWER_BYTES = 1 << 16
FINAL = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.UNPROCESSABLE_ENTITY,
    }
)
"""Final answers: this pod does not belong to the attempt in progress."""


class PodRefusedError(PipeMorphError):
    """Refusal by the ingest: this pod does not belong to the current attempt."""


def make_generation_client(environ: Mapping[str, str], namespace: str, job: str) -> HttpClient:
    """HTTP client of the job's generations, at the Service of the leading ingest.

    Raises :class:`InputError` if the operator's variable is missing.
    """
    name = "PIPEMORPH_INGEST_URL"
    base = validate_url(environ.get(name, ""), name)
    token = environ.get("PIPEMORPH_TOKEN_FILE")
    return HttpClient(
        f"{base}/v1/jobs/{namespace}/{job}/generation",
        Path(token) if token else None,
        environ.get("PIPEMORPH_CA_FILE") or None,
    )


class RestartClient:
    """Client for the restarts of pod number ``pod`` of an attempt. Its threads are daemons.

    ``note`` gets a line when the ingest stops answering, and when it answers again. ``runs``: true
    for a generation that has ranks in this pod.
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
        """Address of the ingest, for messages."""
        self._runs = runs
        self.missed_generation = False
        """True if a generation ran without this pod, so its copies of the state are stale."""
        self._last_state = GenerationState(attempt=attempt, generation=0)
        """Last state from the ingest."""
        self._drain_request: tuple[int, RankLayout] | None = None
        """Generation whose ranks must leave, and the layout to leave for."""
        self._launcher = secrets.token_hex(8)
        self._changed = threading.Condition()
        self._watched: int | None = None
        """Generation that runs here, if any."""
        self._ended_generation: tuple[int, ShutdownReason] | None = None
        """Generation that is over, and the reason."""
        threading.Thread(target=self._watch_generations, name="generations", daemon=True).start()

    def watch_generation(self, generation: int) -> None:
        """Poll from now on for the end of ``generation``, whose ranks run here."""
        with self._changed:
            self._watched = generation
            self._changed.notify()

    def find_shutdown_reason(self, generation: int) -> ShutdownReason | None:
        """Reason of the ingest for which the ranks of ``generation`` must end; None: they run."""
        with self._changed:
            if self._ended_generation is not None and self._ended_generation[0] >= generation:
                return self._ended_generation[1]
        return None

    def find_drain_layout(self, generation: int) -> RankLayout | None:
        """Layout for which the ranks must leave at an iteration boundary; an empty one if a replica
        can join; None if they run on."""
        with self._changed:
            return self._find_drain_layout(generation)

    def _find_drain_layout(self, generation: int | None) -> RankLayout | None:
        leaving = self._drain_request
        return leaving[1] if leaving is not None and leaving[0] == generation else None

    def report_failed(self, generation: int, loss: PodFailure) -> None:
        """Report in the background that the ranks of this pod are about to end."""
        self._send_in_background(self._make_report(generation, "failed", loss=loss))

    def report_resumed(self, generation: int, state: ResumedFrom) -> None:
        """Report in the background the state that the ranks resumed from."""
        self._send_in_background(self._make_report(generation, "resumed", resumed=state))

    def report_drain_refusal(self, generation: int, why: str) -> None:
        """Report in the background that the ranks could not leave, and ``why``."""
        with self._changed:
            if self._find_drain_layout(generation) is not None:
                self._drain_request = None
        self._send_in_background(self._make_report(generation, "stays", why=why))

    def report_completed(self, generation: int, stop: Callable[[], bool]) -> None:
        """Report that all ranks of this pod have finished. Retries for some seconds, or until
        ``stop()``: pods of excluded replicas wait for it."""
        report = self._make_report(generation, "completed")
        self._run_interruptibly(
            lambda cancelled: self._send_until_accepted(report, cancelled), stop
        )

    def join_attempt(
        self, patience: float, stop: Callable[[], bool], *, meets: float | None = None
    ) -> GenerationState | str:
        """Report the start of this launcher, and wait for the generation that it must start: the
        first one, or the next one if this pod replaces another. If the newest generation excludes
        this pod, returns at once: call :meth:`wait_for_next_generation` when ranks can start. Waits
        at most ``patience`` seconds for an ingest, then at most ``meets`` (default: ``patience``),
        or until ``stop()``. Otherwise as :meth:`wait_for_next_generation`."""
        met = patience if meets is None else meets
        return self._run_interruptibly(
            lambda cancelled: self._join_attempt(patience, met, cancelled), stop
        )

    def wait_for_next_generation(
        self,
        generation: int,
        loss: PodFailure | None,
        patience: float,
        stop: Callable[[], bool],
        *,
        finished: int = 0,
        reached: int = 0,
        began: int = 0,
        drained: bool = False,
    ) -> GenerationState | str:
        """Report that the ranks of ``generation`` have ended here, and wait for those of all pods,
        at most ``patience`` seconds or until ``stop()``. ``finished``: iterations of the ranks of
        this pod; ``reached``: those of this generation; ``began``: those at its start;
        ``drained``: all ranks ended for a new layout. Returns a state that names the generation to
        start, or has a verdict; or the reason for which there is none."""
        with self._changed:
            self._watched = None
            left_for = (self._find_drain_layout(generation) or RankLayout()) if drained else None
        gone = {"loss": loss, "reached": reached, "began": began, "left_for": left_for}
        return self._run_interruptibly(
            lambda cancelled: self._wait_for_generation(
                generation, gone, finished, patience, cancelled
            ),
            stop,
        )

    @staticmethod
    def _run_interruptibly(
        wait: Callable[[threading.Event], GenerationState | str], stop: Callable[[], bool]
    ) -> GenerationState | str:
        found: list[GenerationState | str] = []
        cancelled = threading.Event()
        waiting = threading.Thread(
            target=lambda: found.append(wait(cancelled)), name="meeting", daemon=True
        )
        waiting.start()
        while waiting.is_alive() and not stop():
            waiting.join(CHECK_INTERVAL_SECONDS)
        cancelled.set()
        return found[0] if found else "the wait was interrupted"

    def _join_attempt(
        self, patience: float, meets: float, cancelled: threading.Event
    ) -> GenerationState | str:
        end, tell_at = time.monotonic() + patience, time.monotonic() + FIRST_ANSWER_SECONDS

        def note_failure(error: BaseException, _: float) -> None:
            nonlocal tell_at
            if time.monotonic() >= tell_at:
                self._note(f"no ingest accepts this pod: {error}; {_describe_retry_time(end)}")
                tell_at = inf

        # A refusal is retried: the ingest may learn of this pod after the pod has started.
        policy = make_retry_options(
            seconds=patience, longest_pause=LONGEST_PAUSE_SECONDS, stopped=cancelled.is_set,
            sleep=cancelled.wait, on=(NoResponseError, PodRefusedError), before=note_failure,
        )  # fmt: skip
        try:
            state = Retrying(**policy)(
                self._request_state, {}, self._make_report(0, "joined"), REQUEST_SECONDS
            )
        except (NoResponseError, PodRefusedError) as error:
            return f"no ingest accepts this pod: {error} (waited {patience:.0f} s)"
        self._last_state = state
        if state.verdict or not (state.over and self._runs(state)):
            return state
        self._note(f"waiting for the generation after {state.generation}: {state.reason}")
        return self._wait_for_generation(state.generation, {}, 0, meets, cancelled)

    def _wait_for_generation(
        self,
        generation: int,
        gone: Mapping[str, Any],
        finished: int,
        patience: float,
        cancelled: threading.Event,
    ) -> GenerationState | str:
        """Wait as :meth:`wait_for_next_generation`. ``gone``: of the report on ``generation``."""
        end = time.monotonic() + patience
        why, noted = "the ingest has not answered", False

        def request_state() -> GenerationState:
            wait = max(0.0, min(NEXT_GENERATION_POLL_SECONDS, end - time.monotonic()))
            report = self._make_report(generation, "gone", finished=finished, **gone)
            return self._request_state({"wait": f"{wait:.3f}"}, report, wait + REQUEST_SECONDS)

        def note_failure(error: BaseException, _: float) -> None:
            nonlocal noted
            if not noted:
                self._note(f"no ingest has answered: {error}; {_describe_retry_time(end)}")
                noted = True

        while (rest := end - time.monotonic()) > 0 and not cancelled.is_set():
            policy = make_retry_options(
                seconds=None if rest == inf else rest, longest_pause=LONGEST_PAUSE_SECONDS,
                stopped=cancelled.is_set, sleep=cancelled.wait, before=note_failure,
            )  # fmt: skip
            try:
                state = Retrying(**policy)(request_state)
            except PodRefusedError as refusal:
                return f"the ingest refuses this pod: {refusal}"
            except NoResponseError as error:
                why = f"no ingest has answered: {error}"
                continue
            why = f"other pods have not ended their ranks of generation {generation}"
            if state.awaits is not None:
                why = f"no pod has replaced pod {state.awaits}"
                end = time.monotonic() + patience
            # A gap in the generations means that one ran without this pod.
            self.missed_generation |= state.generation > generation + 1
            self._last_state, runs = state, self._runs(state)
            if state.verdict or (state.generation > generation and not state.over and runs):
                return state
            if not runs:
                self._note_exclusion(state)
                self.missed_generation, why = True, "the others train on without this pod"
                end = inf  # There is nothing else to do, even if no ingest answers.
            elif end == inf:
                end = time.monotonic() + patience
            if state.generation > generation:
                # That generation is over already, or has no ranks here.
                generation, gone = state.generation, {}
            else:
                cancelled.wait(state.again)
        return f"{why} (waited {patience:.0f} s)"

    def _note_exclusion(self, state: GenerationState) -> None:
        if not self.missed_generation and not state.over:
            without = ", ".join(map(str, state.excluded_replicas))
            self._note(
                f"generation {state.generation} runs without"
                + (f" replicas {without}" if without else " this pod")
                + "; this pod waits until it is needed"
            )

    def _watch_generations(self) -> None:
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
            if self._find_drain_layout(generation) is not None:
                query["leaving"] = "1"
            try:
                state = self._make_poll_retrying(generation)(
                    self._request_state, query, None, POLL_SECONDS + REQUEST_SECONDS
                )
            except (NoResponseError, PodRefusedError):
                continue  # Another generation runs meanwhile.
            if state.generation > generation or state.over:
                with self._changed:
                    why = state.reason or "another pod's ranks have ended"
                    self._ended_generation = generation, ShutdownReason(why, state.hang)
                    if self._watched == generation:
                        self._watched = None
                continue
            with self._changed:
                same = state.generation == generation and state.layout == self._last_state.layout
                if same and self._watched == generation:
                    # Reports repeat the state: a new ingest may lack it if it was not written.
                    self._last_state = state
            if state.leave != (self._find_drain_layout(generation) is not None):
                with self._changed:
                    self._drain_request = (generation, state.leave_for) if state.leave else None
            elif state.again:
                self._wait_unless_replaced(generation, state.again)

    def _make_poll_retrying(self, generation: int) -> Retrying:
        """Make the retries of a poll, which end when another generation runs here."""

        def log_failure(error: BaseException, _: float) -> None:
            # A refused pod is about to end, or cannot recover; its ranks report the failure.
            level = logging.WARNING if isinstance(error, PodRefusedError) else logging.INFO
            log.log(level, "generations: %s", error)

        policy = make_retry_options(
            longest_pause=LONGEST_POLL_PAUSE_SECONDS, on=(NoResponseError, PodRefusedError),
            before=log_failure, stopped=lambda: self._watched not in (None, generation),
            sleep=lambda seconds: self._wait_unless_replaced(generation, seconds),
        )  # fmt: skip
        return Retrying(**policy)

    def _wait_unless_replaced(self, generation: int, seconds: float) -> None:
        """Wait ``seconds``, or until another generation runs here."""
        with self._changed:
            self._changed.wait_for(lambda: self._watched not in (None, generation), seconds)

    def _send_in_background(self, report: PodReport) -> None:
        threading.Thread(
            target=self._send_until_accepted,
            args=(report, threading.Event()),
            name=report.event,
            daemon=True,
        ).start()

    def _send_until_accepted(self, report: PodReport, cancelled: threading.Event) -> str:
        """Send ``report`` until it is accepted. Returns the reason of a failure, else an empty
        text."""
        policy = make_retry_options(
            seconds=SEND_SECONDS, longest_pause=LONGEST_SEND_PAUSE_SECONDS,
            stopped=cancelled.is_set, sleep=cancelled.wait,
        )  # fmt: skip
        try:
            Retrying(**policy)(self._request_state, {}, report, REQUEST_SECONDS)
        except (NoResponseError, PodRefusedError) as error:
            log.warning("the ingest did not accept the report %r: %s", report.event, error)
            return str(error)
        return ""

    def _request_state(
        self, query: Mapping[str, str], report: PodReport | None, seconds: float
    ) -> GenerationState:
        """Request the ingest's state. Raises :class:`NoResponseError`, :class:`PodRefusedError`."""
        body = report.to_json() if report is not None else None
        whole = query if report is not None else {"attempt": str(self._attempt), **query}
        answer = self._client.request_blocking(
            query=whole, body=body, seconds=seconds, most_bytes=MOST_ANSWER_BYTES
        )
        if answer.status in FINAL:
            raise PodRefusedError(str(answer.to_error()))
        if answer.status != HTTPStatus.OK:
            raise answer.to_error()
        try:
            return GenerationState.model_validate_json(answer.body)
        except ValidationError as error:
            raise PodRefusedError(
                f"its answer is of another release: {one_line(str(error))}"
            ) from None

    def _make_report(
        self, generation: int, event: str, *, why: str = "", **fields: Any
    ) -> PodReport:
        return PodReport.model_validate(
            {
                "attempt": self._attempt,
                "generation": generation,
                "pod": self._pod,
                "launcher": self._launcher,
                "event": event,
                "why": why[:LONGEST_LINE],
                "excluded_replicas": self._last_state.excluded_replicas,
                "layout": self._last_state.layout,
                "layout_before": self._last_state.layout_before,
                **fields,
            }
        )


def _describe_retry_time(end: float) -> str:
    return f"retrying for {max(0.0, end - time.monotonic()):.0f} s".replace("inf s", "ever")
