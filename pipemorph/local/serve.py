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
import shlex
import signal
import socket
import ssl
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty
from typing import TextIO

from pipemorph.errors import InputError, one_line
from pipemorph.ingest import Reply
from pipemorph.local.clock import now
from pipemorph.local.launched_command import (
    LaunchedCommand,
    check_slurm_step,
    format_environment,
    make_certificate,
)
from pipemorph.local.log_collector import collect_logs
from pipemorph.local.processes.interrupts import InterruptHandler
from pipemorph.local.processes.locked_folder import TemporaryFolder
from pipemorph.local.processes.supervision import (
    AGENT_SECONDS,
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
from pipemorph.manifest import check_program, load_job
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
    ``tls_key``: PEM files, both or none. ``out``: folder for the report; None: no report.
    ``env_file``: file for the ranks' variables; None: they are printed. ``command``: starts the
    ranks; empty: another launcher does. With a command, files that are None are made."""

    listen: str
    token_file: Path | None
    secret_file: Path | None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    out: Path | None = None
    force: bool = False
    env_file: Path | None = None
    command: tuple[str, ...] = ()
    watch: int | None = None
    """Port of the live page, 0 for any; None: no page."""
    metrics: str | None = None
    """HOST:PORT of the metrics; None: no metrics."""


def serve_job(manifest: str, options: ServeOptions, *, stream: TextIO | None = None) -> int:
    """Host the control loop of the job of ``manifest`` until the job completes or fails; with a
    command, run it meanwhile, until it ends.

    Returns the exit status: 0 completed, 1 not completed, 130 interrupted; that of the command,
    unless it is 0. Raises :class:`InputError` before anything is served if the manifest or an
    option is invalid. Call it from the main thread.
    """
    job = load_job(manifest)
    host, port = parse_listen(options.listen)
    check_command(options)
    journal, events = RunJournal(), Events()
    run = RunRecord(job, now())
    roll = JoinTracker(job, journal)
    interrupts = InterruptHandler(events)
    progress = ProgressDisplay(
        stream or sys.stdout, job, journal, on_closed=interrupts.handle_closed_output,
        command=COMMAND, live=not options.command,
    )  # fmt: skip
    status = 0
    with ExitStack() as outer:
        folder = None
        try:
            with ExitStack() as stack:
                stack.enter_context(interrupts)
                command = None
                if options.command:
                    command, options = prepare_command(options, host, stack)
                assert options.token_file is not None and options.secret_file is not None
                tls = make_tls_context(options, host)
                token = load_or_create_secret(options.token_file, "--token-file")
                load_or_create_secret(options.secret_file, "--secret-file")
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
                start_metrics(options, service, stack, progress.print_note)
                if options.out:
                    folder = outer.enter_context(
                        ResultFolder.claim_folder(options.out, force=options.force)
                    )
                variables = build_served_environment(service.url, options)
                if options.env_file is not None:
                    write_env_file(options.env_file, variables)
                progress.print_note(format_job_headline(job))

                def show_updates() -> None:
                    for text in roll.take_announcements():
                        progress.print_note(text)
                    refresh()

                if command is None:
                    progress.print_note(format_rank_environment(variables))
                    ending = _wait_until_over(
                        run, roll, service,
                        events=events, update=show_updates, note=progress.print_note,
                    )  # fmt: skip
                else:
                    if is_loopback(host):
                        # All ranks are on this machine, whose name may resolve to another address.
                        variables.setdefault(
                            "GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo")
                        )
                    command.start(variables)
                    try:
                        ending = _wait_for_command(
                            run, roll, service, command, events=events, update=show_updates
                        )
                    finally:
                        command.end()
                    if ending.outcome is not AttemptOutcome.DEADLINE:
                        status = command.exit_code
                conclude_run(run, ending, journal, service, progress.print_note)
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001  # The ranks train on; the report is written.
            ending = record_host_failure(run, journal, error, folder)
        complete = folder is None or write_result(write_report, folder, run, command=COMMAND)
    lines = [run.format_summary()]
    if folder is not None and complete:
        lines.append(f"report: {folder.report}")
    if ending.outcome is not AttemptOutcome.COMPLETED:
        # Last, as a launcher prints much before it.
        lines.append(ending.format_lines())
    progress.print_note("\n".join(lines))
    status = status or EXIT_STATUS[ending.outcome]
    return status if complete else status or UNWRITTEN_STATUS


def check_command(options: ServeOptions) -> None:
    """Raise :class:`InputError` if the command of ``options`` cannot be started here."""
    if options.command:
        check_slurm_step()
        check_program(options.command, "the command after --")


def prepare_command(
    options: ServeOptions, host: str, stack: ExitStack
) -> tuple[LaunchedCommand, ServeOptions]:
    """The command of ``options``, not started, and the options with all files: a token and a
    secret, and a certificate if other machines reach ``host``. Missing ones are made in a private
    folder, which ``stack`` removes: in the current one if other machines read it, as on a shared
    file system. Raises :class:`InputError`."""
    here = is_loopback(host)
    parent = Path(tempfile.gettempdir()) if here else Path.cwd()
    try:
        private = TemporaryFolder("serve", parent)
    except OSError as error:
        raise InputError(
            f"a folder for the ranks' secrets cannot be made in {display_name(parent)}: "
            f"{error.strerror}"
        ) from None
    command = stack.enter_context(LaunchedCommand(options.command, private))
    cert, key = options.tls_cert, options.tls_key
    if not here and cert is None and key is None:
        cert, key = private.root / "tls.crt", private.root / "tls.key"
        make_certificate(find_reachable_name(host), cert, key)
    return command, replace(
        options, tls_cert=cert, tls_key=key,
        token_file=options.token_file or private.root / "token",
        secret_file=options.secret_file or private.root / "secret",
    )  # fmt: skip


def parse_listen(text: str, option: str = "--listen") -> tuple[str, int]:
    """``HOST:PORT`` or ``[IPV6]:PORT``, of ``option``. Raises :class:`InputError`."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    # int() raises another error for thousands of digits.
    if not (colon and host and re.fullmatch(r"\d{1,5}", port, re.ASCII) and int(port) < 1 << 16):
        raise InputError(
            f"{option} is {one_line(text)!r}; expected HOST:PORT, such as 127.0.0.1:7411 or "
            "[::1]:7411; port 0 is any free port"
        )
    return host, int(port)


def start_metrics(
    options: ServeOptions, service: ControlService, stack: ExitStack, note: Callable[[str], None]
) -> None:
    """Serve the metrics of the service's job for Prometheus, if ``options`` ask for them, until
    ``stack`` is closed: those that the ingest of a cluster exports, over plain HTTP and without a
    token as there. Raises :class:`InputError`."""
    if options.metrics is None:
        return
    host, port = parse_listen(options.metrics, "--metrics")
    try:
        # Imported late: it is optional.
        from prometheus_client import start_http_server

        from pipemorph.views.status.job_metrics import update_job_metrics
    except ImportError:
        raise InputError(
            "--metrics needs prometheus-client, which is not installed: "
            f"{shlex.quote(sys.executable)} -m pip install 'prometheus-client>=0.20'"
        ) from None
    try:
        server, _ = start_http_server(port, host)
    except OSError as error:
        raise InputError(
            f"--metrics {one_line(options.metrics)} cannot be used: {error.strerror or error}"
        ) from None
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    service.update_metrics = update_job_metrics
    shown = f"[{host}]" if ":" in host else host
    note(f"metrics: http://{shown}:{server.server_port}/metrics")


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
            "travels in clear text; give --tls-cert and --tls-key, listen at 127.0.0.1, or give "
            "the command that starts the ranks after --, which makes a certificate"
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


def find_reachable_name(host: str) -> str:
    """Name or address at which other machines reach a server that listens at ``host``."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            name = socket.getfqdn()
            # What getfqdn() returns if the resolver names this machine so.
            return socket.gethostname() if name.startswith("localhost") else name
    return host


def build_served_environment(
    url: str, options: ServeOptions, *, observe: bool = False
) -> dict[str, str]:
    """Environment variables that the ranks need. ``observe``: PipeMorph does not run them."""
    assert options.token_file is not None and options.secret_file is not None
    scheme, _, address = url.partition("://")
    host, _, port = address.rpartition(":")
    reached = find_reachable_name(host.strip("[]"))
    host = host if reached == host.strip("[]") else reached
    values = {
        "PIPEMORPH_INGEST_URL": f"{scheme}://{host}:{port}",
        "PIPEMORPH_TOKEN_FILE": str(options.token_file.resolve()),
    }
    if not observe:
        values["PIPEMORPH_SECRET_FILE"] = str(options.secret_file.resolve())
    if options.tls_cert is not None:
        values["PIPEMORPH_CA_FILE"] = str(options.tls_cert.resolve())
    if options.out is not None and not observe:
        # What pipemorph diagnose reads. A rank that cannot write there trains without.
        values["PIPEMORPH_TRACE_DIR"] = str(ResultFolder(options.out.resolve()).trace)
    return values


def format_rank_environment(variables: Mapping[str, str]) -> str:
    """Environment variables that the ranks need, as lines to copy."""
    lines = (f"  {line}" for line in format_environment(variables).splitlines())
    return "\n".join(("every rank needs:", *lines))


def write_env_file(path: Path, variables: Mapping[str, str]) -> None:
    """Write the variables as lines that a shell reads with ``.``, whole or not at all. Raises
    :class:`InputError`."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(format_environment(variables))
        part.replace(path)
    except OSError as error:
        raise InputError(
            f"--env-file {display_name(path)} cannot be written: {error.strerror}"
        ) from None


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
            f"{named}. Each needs PIPEMORPH_INGEST_URL and the other variables of {COMMAND}"
        )


def _follow_attempts(run: RunRecord, roll: JoinTracker) -> RunAttempt:
    """The attempt of the ranks; a new one if they have started again."""
    attempt = roll.attempt
    record = run.attempts[-1] if run.attempts else None
    if record is not None and record.number == attempt:
        return record
    if record is not None and record.result is None:
        ending = AttemptResult(AttemptOutcome.FAILED, "its ranks started again")
        record.record_result(ending, now())
    run.attempts.append(RunAttempt(attempt, now()))
    return run.attempts[-1]


def _exceeds_deadline(run: RunRecord) -> AttemptResult | None:
    limit = run.job.spec.active_deadline_seconds
    if limit is None or now() - run.started_at <= limit:
        return None
    reason = f"not over within {limit:g} s (spec.activeDeadlineSeconds)"
    return AttemptResult(AttemptOutcome.DEADLINE, reason)


def _wait_for_command(
    run: RunRecord,
    roll: JoinTracker,
    service: ControlService,
    command: LaunchedCommand,
    *,
    events: Events,
    update: Callable[[], None],
) -> AttemptResult:
    """Follow the job until the command that starts its ranks has ended. Signals are forwarded."""
    stopped: signal.Signals | None = None
    last_report_at: float | None = None
    while True:
        event = None
        with contextlib.suppress(Empty):
            event = events.get(timeout=REFRESH_SECONDS)
        update()
        record = _follow_attempts(run, roll)
        if isinstance(event, SignalReceived):
            stopped = stopped or event.number
            command.send_signal(event.number)
        if command.status is None:
            if (late := _exceeds_deadline(run)) is not None:
                return record.record_result(late, now())
            continue
        # Rank 0's agent sends the last report after its rank has exited.
        last_report_at = last_report_at or time.monotonic() + AGENT_SECONDS
        reported = service.reported_at is not None and roll.journal.view.state not in OVER_STATES
        if reported and time.monotonic() < last_report_at:
            continue
        done, wanted = roll.journal.count_done(), run.job.spec.trainer.iterations
        if command.status == 0 and done >= wanted:
            return record.record_result(AttemptResult(AttemptOutcome.COMPLETED), now())
        reason = f"{done} of {wanted} iterations; {command.describe_exit()}"
        outcome = AttemptOutcome.FAILED
        if stopped is not None:
            outcome, reason = AttemptOutcome.INTERRUPTED, f"stopped by {stopped.name}; {reason}"
        elif service.reported_at is None and command.status == 0:
            reason += "; no rank has reported: the script has to use TrainerContext.from_env()"
        return record.record_result(AttemptResult(outcome, reason), now())


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
    while True:
        stopped = None
        with contextlib.suppress(Empty):
            stopped = events.get(timeout=REFRESH_SECONDS)
        update()
        # Before the view is read, which is reset before the attempt changes.
        record = _follow_attempts(run, roll)
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
        if (late := _exceeds_deadline(run)) is not None:
            return record.record_result(late, now())
