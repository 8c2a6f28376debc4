"""``pipemorph serve``: the control loop of one job whose ranks another launcher starts.

The ranks ask for their job (``GET /v1/job``) and report, as under ``pipemorph run``. They train on
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

from pipemorph.api.spec import PipeMorphJob
from pipemorph.document import named, read_text
from pipemorph.errors import InputError, one_line
from pipemorph.explain.story import few
from pipemorph.ingest import Reply
from pipemorph.local.clock import now
from pipemorph.local.host import (
    EXIT,
    UNWRITTEN_STATUS,
    conclude,
    end_of_host,
    written,
)
from pipemorph.local.logs import collected_logs
from pipemorph.local.processes.interrupts import Interrupts
from pipemorph.local.processes.supervise import (
    REFRESH_SECONDS,
    End,
    Ending,
    Events,
    Signalled,
)
from pipemorph.local.progress import Progress, headline
from pipemorph.local.results.history import Journal
from pipemorph.local.results.outputs import OutFolder
from pipemorph.local.results.report import AttemptRecord, RunRecord, write_report
from pipemorph.local.service import ControlService
from pipemorph.manifest import load_job

WHO = "pipemorph serve"
JOIN_SECONDS = 60.0
"""Time after which ranks that have not come are named."""
LAST_REPORT_SECONDS = 10.0
"""Silence after which a job whose last iteration was reported is over: its agent has ended before
it could say so."""
MOST_NAMED = 16
MOST_BYTES = 4096
"""Of a file that holds a secret."""
ENDS = ("finished", "failed")
"""States of a job that is over."""


@dataclass(frozen=True)
class ServeOptions:
    """``listen``: HOST:PORT, port 0 for any. ``tls_cert`` and ``tls_key``: PEM files, both or none.
    ``out``: folder for the report; None: no report."""

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
    tls = tls_context(options, host)
    token = kept_secret(options.token_file, "--token-file")
    kept_secret(options.secret_file, "--secret-file")
    journal, events = Journal(), Events()
    run = RunRecord(job, now())
    roll = RollCall(job, journal)
    interrupts = Interrupts(events)
    progress = Progress(stream, job, journal, on_closed=interrupts.output_closed, who=WHO)
    with ExitStack() as outer:
        folder = None
        try:
            with ExitStack() as stack:
                stack.enter_context(interrupts)
                stack.callback(progress.close)
                refresh = stack.enter_context(collected_logs(progress))
                service = ControlService(
                    job, journal, token=token, host=host, port=port, tls=tls, join=roll.join
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
                    folder = outer.enter_context(OutFolder.claim(options.out, force=options.force))
                progress.note(headline(job))
                progress.note(environment(service.url, options))

                def update() -> None:
                    for text in roll.news():
                        progress.note(text)
                    refresh()

                ending = _until_over(
                    run, roll, service, events=events, update=update, note=progress.note
                )
                conclude(run, ending, journal, service, progress.note)
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001  # The ranks train on; the report is written.
            ending = end_of_host(run, journal, error, folder)
        complete = folder is None or written(write_report, folder, run, who=WHO)
    lines = [] if ending.end is End.COMPLETED else [ending.describe()]
    lines.append(run.summary())
    if folder is not None and complete:
        lines.append(f"report: {folder.report}")
    progress.note("\n".join(lines))
    return EXIT[ending.end] if complete else EXIT[ending.end] or UNWRITTEN_STATUS


def parse_listen(text: str) -> tuple[str, int]:
    """``HOST:PORT`` or ``[IPV6]:PORT``. Raises :class:`InputError`."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    # int() raises an error of its own for thousands of digits.
    if not (colon and host and re.fullmatch(r"\d{1,5}", port, re.ASCII) and int(port) < 1 << 16):
        raise InputError(
            f"--listen is {one_line(text)!r}; expected HOST:PORT, such as 127.0.0.1:7411 or "
            "[::1]:7411; port 0 is any free port"
        )
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def tls_context(options: ServeOptions, host: str) -> ssl.SSLContext | None:
    """The server's TLS; None for a loopback address without a certificate. Raises
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


def kept_secret(path: Path, what: str) -> str:
    """The secret in a file, without white space around it: ranks of another launcher prove with it
    that they belong to a job. If there is no such file, it is made, with a new random secret and
    mode 0600.

    ``what``: the option that names the file. Raises :class:`InputError` if the file is empty, can
    be read by other users, or cannot be read or made.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return existing_secret(path, what)
    except (OSError, ValueError) as error:
        # ValueError: a zero byte in the name.
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{what} {named(path)} cannot be made: {why}") from None
    text = secrets.token_urlsafe(32)
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")
    return text


def existing_secret(path: Path, what: str) -> str:
    """The same, of a file that must be there."""
    text = read_text(path, MOST_BYTES).strip()
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise InputError(
            f"{what} {named(path)} can be read by other users (mode {mode:04o}); chmod 600 it"
        )
    if not text or not text.isascii() or not text.isprintable():
        raise InputError(
            f"{what} {named(path)} holds no secret; expected one line of printable ASCII"
        )
    return text


def environment(url: str, options: ServeOptions) -> str:
    """What the ranks' environment needs, as lines to copy."""
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
        "SECRET_FILE": str(options.secret_file.resolve()),
    }
    if options.tls_cert is not None:
        values["CA_FILE"] = str(options.tls_cert.resolve())
    return "\n".join(
        ("every rank needs:", *(f"  export PIPEMORPH_{name}={v}" for name, v in values.items()))
    )


@dataclass
class RollCall:
    """Which ranks of the present attempt have come. :meth:`join` runs in the ingest's thread, the
    rest in the main thread."""

    job: PipeMorphJob
    journal: Journal
    service: ControlService | None = None
    attempt: int = 0
    _came: set[int] = field(default_factory=set)
    _since: float = field(default_factory=time.monotonic)
    _told: bool = False
    _refused: dict[str, None] = field(default_factory=dict)
    """Refusals that are not told yet, each once."""
    _all_refused: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def join(self, query: Mapping[str, str], address: str) -> Reply:
        """Answer a rank that asks for its job: the job, or why it is not a rank of it."""
        numbers = {}
        for name in ("rank", "world_size", "attempt"):
            text = query.get(name, "")
            if not (text.isascii() and text.isdigit() and len(text) <= 9):
                return Reply.error(
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
                    self._refused[text] = None
                return Reply.error(409, f"this rank {why}")
            if attempt > self.attempt:
                assert self.service is not None
                self.service.begin_attempt_here(attempt)
                self.journal.forget_view()
                self.attempt, self._told = attempt, False
                self._came.clear()
            if not self._came:
                self._since = time.monotonic()
            self._came.add(rank)
        return Reply(200, self.job.model_dump_json(by_alias=True, exclude_none=True).encode())

    def news(self) -> list[str]:
        """What is to be told now: refused ranks, that all have come, or who has not."""
        with self._lock:
            found = list(self._refused)
            self._refused.clear()
            missing = self.job.spec.parallelism.world_size - len(self._came)
            # Ranks that report have all come, perhaps to an earlier host of this job.
            heard = self.service is not None and self.service.heard_at is not None
            if self._told or (missing and (heard or time.monotonic() - self._since < JOIN_SECONDS)):
                return found
            self._told = True
            return [*found, self._attendance()]

    def _attendance(self) -> str:
        ranks = self.job.spec.parallelism.world_size
        missing = [rank for rank in range(ranks) if rank not in self._came]
        if not missing:
            return f"all {ranks} ranks have come"
        named = few(map(str, missing), MOST_NAMED)
        return (
            f"{len(self._came)} of {ranks} ranks have come in {JOIN_SECONDS:.0f} s; missing: "
            f"{named}. Each needs the variables above"
        )


def _until_over(
    run: RunRecord,
    roll: RollCall,
    service: ControlService,
    *,
    events: Events,
    update: Callable[[], None],
    note: Callable[[str], None],
) -> Ending:
    """Follow the job from the reports of its ranks, until it is over."""
    spec = run.job.spec
    wanted = spec.trainer.iterations
    record = AttemptRecord(roll.attempt, now())
    run.attempts.append(record)
    while True:
        stopped = None
        with contextlib.suppress(Empty):
            stopped = events.get(timeout=REFRESH_SECONDS)
        update()
        # Before the view, which is forgotten before the attempt is counted on.
        attempt = roll.attempt
        if attempt != record.number:
            if record.ending is None:
                record.end(Ending(End.FAILED, "its ranks started again"), now())
            record = AttemptRecord(attempt, now())
            run.attempts.append(record)
        view, done = roll.journal.view, roll.journal.done()
        quiet = service.silence() > LAST_REPORT_SECONDS
        if done >= wanted and (view.state == "finished" or (quiet and view.state != "failed")):
            return record.end(Ending(End.COMPLETED), now())
        if isinstance(stopped, Signalled):
            reason = f"stopped by {stopped.number.name}; the ranks train on with their plan"
            return record.end(Ending(End.INTERRUPTED, reason), now())
        if record.ending is None and (view.state == "failed" or (quiet and view.state in ENDS)):
            reason = f"the ranks ended after {done} of {wanted} iterations"
            told = f"{reason}: {one_line(view.message)}" if view.message else reason
            ending = record.end(Ending(End.FAILED, told), now())
            restart, most = len(run.attempts), spec.failure_policy.max_restarts
            if restart > most:
                return ending
            note(f"{reason}; waiting for the ranks to start again: {restart} of at most {most}")
        limit = spec.active_deadline_seconds
        if limit is not None and now() - run.started_at > limit:
            reason = f"not over within {limit:g} s (spec.activeDeadlineSeconds)"
            return record.end(Ending(End.DEADLINE, reason), now())
