"""``pipemorph serve``: the control loop of one job whose ranks another launcher starts.

The ranks request their job (``GET /v1/job``) and report, as under ``pipemorph run``. They train on
if this host ends.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import secrets
import socket
import ssl
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import TextIO

from pipemorph.errors import InputError, one_line
from pipemorph.ingest import Reply
from pipemorph.local.clock import now
from pipemorph.local.log_collector import collect_logs
from pipemorph.local.processes.interrupts import InterruptHandler
from pipemorph.local.processes.supervision import (
    REFRESH_SECONDS,
    AttemptOutcome,
    AttemptResult,
    Events,
    SignalReceived,
)
from pipemorph.local.progress import ProgressDisplay, format_job_headline
from pipemorph.local.results.journal import RunJournal
from pipemorph.local.results.report import RunAttempt, RunRecord, write_report
from pipemorph.local.results.result_folder import ResultFolder
from pipemorph.local.run import (
    EXIT_STATUS,
    UNWRITTEN_STATUS,
    conclude_run,
    record_host_failure,
    write_result,
)
from pipemorph.local.service import ControlService
from pipemorph.manifest import load_job
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.views.explanation.explanation_text import join_few
from pipemorph.yaml_json import display_name, read_text

COMMAND = "pipemorph serve"
JOIN_SECONDS = 60.0
"""Time after which missing ranks are named."""
LAST_REPORT_SECONDS = 10.0
"""Time without reports after which a job that reported its last iteration is over: its agent has
ended early."""
MOST_NAMED = 16
MOST_BYTES = 4096
"""Size limit of a file with a secret."""
OVER_STATES = ("finished", "failed")
"""States of a job that is over."""


@dataclass(frozen=True)
class ServeOptions:
    """Options of ``pipemorph serve``. ``listen``: HOST:PORT, port 0 for any. ``tls_cert`` and
    ``tls_key``: PEM files, both or none. ``out``: folder for the report; None: no report."""

    listen: str
    token_file: Path
    secret_file: Path
    tls_cert: Path | None = None
    tls_key: Path | None = None
    out: Path | None = None
    force: bool = False


def serve_job(manifest: str, options: ServeOptions, *, stream: TextIO = sys.stdout) -> int:
    """Host the control loop of the job of ``manifest`` until the job completes or fails.

    Returns the exit status: 0 completed, 1 not completed, 130 interrupted. Raises
    :class:`InputError` before anything is served if the manifest or an option is invalid. Call it
    from the main thread.
    """
    job = load_job(manifest)
    host, port = parse_listen(options.listen)
    tls = make_tls_context(options, host)
    token = load_or_create_secret(options.token_file, "--token-file")
    load_or_create_secret(options.secret_file, "--secret-file")
    journal, events = RunJournal(), Events()
    run = RunRecord(job, now())
    roll = JoinTracker(job, journal)
    interrupts = InterruptHandler(events)
    progress = ProgressDisplay(
        stream, job, journal, on_closed=interrupts.handle_closed_output, command=COMMAND
    )
    with ExitStack() as outer:
        folder = None
        try:
            with ExitStack() as stack:
                stack.enter_context(interrupts)
                stack.callback(progress.close)
                refresh = stack.enter_context(collect_logs(progress))
                service = ControlService(
                    job, journal, token=token, host=host, port=port, tls=tls, join=roll.handle_join
                )
                roll.service = service
                try:
                    stack.enter_context(service)
                except OSError as error:
                    raise InputError(
                        f"--listen {one_line(options.listen)} cannot be used: "
                        f"{error.strerror or error}"
                    ) from None
                if options.out:
                    folder = outer.enter_context(
                        ResultFolder.claim_folder(options.out, force=options.force)
                    )
                progress.print_note(format_job_headline(job))
                progress.print_note(format_rank_environment(service.url, options))

                def show_updates() -> None:
                    for text in roll.take_announcements():
                        progress.print_note(text)
                    refresh()

                ending = _wait_until_over(
                    run, roll, service, events=events, update=show_updates, note=progress.print_note
                )
                conclude_run(run, ending, journal, service, progress.print_note)
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001  # The ranks train on; the report is written.
            ending = record_host_failure(run, journal, error, folder)
        complete = folder is None or write_result(write_report, folder, run, command=COMMAND)
    lines = [] if ending.outcome is AttemptOutcome.COMPLETED else [ending.format_lines()]
    lines.append(run.format_summary())
    if folder is not None and complete:
        lines.append(f"report: {folder.report}")
    progress.print_note("\n".join(lines))
    return (
        EXIT_STATUS[ending.outcome] if complete else EXIT_STATUS[ending.outcome] or UNWRITTEN_STATUS
    )


def parse_listen(text: str) -> tuple[str, int]:
    """``HOST:PORT`` or ``[IPV6]:PORT``. Raises :class:`InputError`."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    # int() raises another error for thousands of digits.
    if not (colon and host and re.fullmatch(r"\d{1,5}", port, re.ASCII) and int(port) < 1 << 16):
        raise InputError(
            f"--listen is {one_line(text)!r}; expected HOST:PORT, such as 127.0.0.1:7411 or "
            "[::1]:7411; port 0 is any free port"
        )
    return host, int(port)


def is_loopback(host: str) -> bool:
    """True if only this machine reaches ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def make_tls_context(options: ServeOptions, host: str) -> ssl.SSLContext | None:
    """TLS context of the server; None for a loopback address without a certificate. Raises
    :class:`InputError` if another address has none, or if the files do not fit."""
    certificate, key = options.tls_cert, options.tls_key
    if (certificate is None) != (key is None):
        raise InputError("--tls-cert and --tls-key are given together, or neither of them")
    if certificate is None or key is None:
        if is_loopback(host):
            return None
        raise InputError(
            f"--listen {one_line(host)} is reached by other machines, and without TLS the token "
            "travels in clear text; give --tls-cert and --tls-key, or listen at 127.0.0.1"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        why = error.strerror or str(error)
        raise InputError(
            f"--tls-cert {one_line(str(certificate))}, --tls-key {one_line(str(key))}: {why}; "
            "expected a certificate and its key in PEM format"
        ) from None
    return context


def load_or_create_secret(path: Path, option: str) -> str:
    """Secret in a file, without surrounding white space: with it ranks of another launcher prove
    that they belong to a job. A missing file is made, with a new random secret and mode 0600.

    ``option``: that names the file. Raises :class:`InputError` if the file is empty, can
    be read by other users, or cannot be read or made.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return load_secret(path, option)
    except (OSError, ValueError) as error:
        # ValueError: a zero byte in the name.
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{option} {display_name(path)} cannot be made: {why}") from None
    text = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")
    return text


def load_secret(path: Path, option: str) -> str:
    """Secret in a file that must exist, see :func:`load_or_create_secret`."""
    text = read_text(path, MOST_BYTES).strip()
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise InputError(
            f"{option} {display_name(path)} can be read by other users (mode {mode:04o});"
            " chmod 600 it"
        )
    if not text or not text.isascii() or not text.isprintable():
        raise InputError(
            f"{option} {display_name(path)} holds no secret; expected one line of printable ASCII"
        )
    return text


def format_rank_environment(url: str, options: ServeOptions, *, observe: bool = False) -> str:
    """Environment variables that the ranks need, as lines to copy. ``observe``: PipeMorph does not
    run them."""
    scheme, _, address = url.partition("://")
    host, _, port = address.rpartition(":")
    try:
        anywhere = ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        anywhere = False
    if anywhere:
        host = socket.getfqdn()
    values = {
        "INGEST_URL": f"{scheme}://{host}:{port}",
        "TOKEN_FILE": str(options.token_file.resolve()),
    }
    if not observe:
        values["SECRET_FILE"] = str(options.secret_file.resolve())
    if options.tls_cert is not None:
        values["CA_FILE"] = str(options.tls_cert.resolve())
    if options.out is not None and not observe:
        # What pipemorph diagnose reads. A rank that cannot write there trains without.
        values["TRACE_DIR"] = str(ResultFolder(options.out.resolve()).trace)
    return "\n".join(
        ("every rank needs:", *(f"  export PIPEMORPH_{name}={v}" for name, v in values.items()))
    )


@dataclass
class JoinTracker:
    """Ranks of the attempt that have joined. :meth:`handle_join` runs in the ingest's thread."""

    job: PipeMorphJob
    journal: RunJournal
    service: ControlService | None = None
    attempt: int = 0
    _joined: set[int] = field(default_factory=set)
    _since: float = field(default_factory=time.monotonic)
    _announced: bool = False
    _new_refusals: dict[str, None] = field(default_factory=dict)
    """Refusals that are not printed yet, each once."""
    _all_refused: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def handle_join(self, query: Mapping[str, str], address: str) -> Reply:
        """Answer a rank that requests its job: the job, or the reason for a refusal."""
        numbers = {}
        for name in ("rank", "world_size", "attempt"):
            text = query.get(name, "")
            if not (text.isascii() and text.isdigit() and len(text) <= 9):
                return Reply.from_error(
                    400, f"{name} is {text[:40]!r}; expected an integer of 0 or more", field=name
                )
            numbers[name] = int(text)
        rank, world_size, attempt = numbers["rank"], numbers["world_size"], numbers["attempt"]
        name, ranks = self.job.metadata.name, self.job.spec.parallelism.world_size
        with self._lock:
            why = ""
            if world_size != ranks or rank >= ranks:
                why = f"is of {world_size} ranks (WORLD_SIZE); job {name} has {ranks}"
            elif attempt < self.attempt:
                why = (
                    f"is of attempt {attempt}; job {name} is in attempt {self.attempt}. Set "
                    f"PIPEMORPH_ATTEMPT to {self.attempt + 1}, or start pipemorph serve again"
                )
            if why:
                text = f"rank {rank} from {address} is refused: it {why}"
                if text not in self._all_refused and len(self._all_refused) < 1000:
                    self._all_refused.add(text)
                    self._new_refusals[text] = None
                return Reply.from_error(409, f"this rank {why}")
            if attempt > self.attempt:
                assert self.service is not None
                self.service.begin_attempt_in_loop(attempt)
                self.journal.reset_view()
                self.attempt, self._announced = attempt, False
                self._joined.clear()
            if not self._joined:
                self._since = time.monotonic()
            self._joined.add(rank)
        return Reply(200, self.job.model_dump_json(by_alias=True, exclude_none=True).encode())

    def take_announcements(self) -> list[str]:
        """New messages: refused ranks, that all ranks have joined, or the missing ranks."""
        with self._lock:
            found = list(self._new_refusals)
            self._new_refusals.clear()
            missing = self.job.spec.parallelism.world_size - len(self._joined)
            # Ranks that report have all joined, perhaps at an earlier host of this job.
            seen = self.service is not None and self.service.reported_at is not None
            if self._announced or (
                missing and (seen or time.monotonic() - self._since < JOIN_SECONDS)
            ):
                return found
            self._announced = True
            return [*found, self._describe_missing_ranks()]

    def _describe_missing_ranks(self) -> str:
        ranks = self.job.spec.parallelism.world_size
        missing = [rank for rank in range(ranks) if rank not in self._joined]
        if not missing:
            return f"all {ranks} ranks have joined"
        named = join_few(map(str, missing), MOST_NAMED)
        return (
            f"{len(self._joined)} of {ranks} ranks have joined in {JOIN_SECONDS:.0f} s; missing: "
            f"{named}. Each needs the variables above"
        )


def _wait_until_over(
    run: RunRecord,
    roll: JoinTracker,
    service: ControlService,
    *,
    events: Events,
    update: Callable[[], None],
    note: Callable[[str], None],
) -> AttemptResult:
    """Follow the job by the reports of its ranks, until it is over."""
    spec = run.job.spec
    wanted = spec.trainer.iterations
    record = RunAttempt(roll.attempt, now())
    run.attempts.append(record)
    while True:
        stopped = None
        with contextlib.suppress(Empty):
            stopped = events.get(timeout=REFRESH_SECONDS)
        update()
        # Read before the view, which is reset before the attempt changes.
        attempt = roll.attempt
        if attempt != record.number:
            if record.result is None:
                record.record_result(
                    AttemptResult(AttemptOutcome.FAILED, "its ranks started again"), now()
                )
            record = RunAttempt(attempt, now())
            run.attempts.append(record)
        view, done = roll.journal.view, roll.journal.count_done()
        quiet = service.seconds_since_report() > LAST_REPORT_SECONDS
        if done >= wanted and (view.state == "finished" or (quiet and view.state != "failed")):
            return record.record_result(AttemptResult(AttemptOutcome.COMPLETED), now())
        if isinstance(stopped, SignalReceived):
            reason = f"stopped by {stopped.number.name}; the ranks train on with their plan"
            return record.record_result(AttemptResult(AttemptOutcome.INTERRUPTED, reason), now())
        if record.result is None and (
            view.state == "failed" or (quiet and view.state in OVER_STATES)
        ):
            reason = f"the ranks ended after {done} of {wanted} iterations"
            whole = f"{reason}: {one_line(view.message)}" if view.message else reason
            ending = record.record_result(AttemptResult(AttemptOutcome.FAILED, whole), now())
            restart, most = len(run.attempts), spec.failure_policy.max_restarts
            if restart > most:
                return ending
            note(f"{reason}; waiting for the ranks to start again: {restart} of at most {most}")
        limit = spec.active_deadline_seconds
        if limit is not None and now() - run.started_at > limit:
            reason = f"not over within {limit:g} s (spec.activeDeadlineSeconds)"
            return record.record_result(AttemptResult(AttemptOutcome.DEADLINE, reason), now())
