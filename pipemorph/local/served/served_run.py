"""Run whose ranks another launcher starts, from its options to its report: what ``pipemorph serve``
and ``pipemorph serve --observe`` have in common.

The ranks train on if this host ends, unless it has started them.
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
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty
from typing import Any, TextIO

from pipemorph.errors import InputError, one_line
from pipemorph.local.live_page import LivePageServer, open_page_listener
from pipemorph.local.log_collector import collect_logs
from pipemorph.local.processes.interrupts import InterruptHandler
from pipemorph.local.processes.locked_folder import TemporaryFolder
from pipemorph.local.processes.supervision import (
    REFRESH_SECONDS,
    AttemptOutcome,
    AttemptResult,
    Events,
    SignalReceived,
)
from pipemorph.local.progress import ProgressDisplay, format_job_headline
from pipemorph.local.results.journal import RunJournal
from pipemorph.local.results.page_source import LivePageSource, RunState, TraceSource
from pipemorph.local.results.report import RunRecord
from pipemorph.local.results.result_folder import ResultFolder
from pipemorph.local.results.status_file import StatusFile
from pipemorph.local.results.stored_page import read_final_state
from pipemorph.local.run import (
    EXIT_STATUS,
    UNWRITTEN_STATUS,
    conclude_run,
    record_host_failure,
    write_results,
)
from pipemorph.local.served.launched_command import (
    LaunchedCommand,
    check_slurm_step,
    format_environment,
    make_certificate,
)
from pipemorph.local.service import ControlService
from pipemorph.manifest import check_program
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.yaml_json import display_name, read_text

COMMAND = "pipemorph serve"
MOST_BYTES = 4096
"""Size limit of a file with a secret."""


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


class ServedRun(ABC):
    """Run whose ranks another launcher starts. Subclasses make the service, and follow the
    ranks."""

    service: ControlService
    run: RunRecord | None = None
    """Record of the run; None before a step of an observed job."""
    traces: TraceSource | None = None
    """Ops of its iterations; None: those in the folder."""

    def __init__(
        self, options: ServeOptions, stream: TextIO | None, job: PipeMorphJob | None = None
    ) -> None:
        self.options, self.stack = options, ExitStack()
        self.journal, self.events = RunJournal(), Events()
        self._interrupts = InterruptHandler(self.events)
        self.progress = ProgressDisplay(
            stream or sys.stdout, job, self.journal, command=COMMAND, live=not options.command,
            on_closed=self._interrupts.handle_closed_output,
        )  # fmt: skip
        self.command: LaunchedCommand | None = None
        self.folder: ResultFolder | None = None
        self._concluded = False
        self._page: LivePageServer | None = None
        self._listener: socket.socket | None = None

    @abstractmethod
    def make_service(self, **server: Any) -> ControlService:
        """Make the service of the job, not entered. ``server``: token, host, port, TLS context."""

    @abstractmethod
    def follow_ranks(self) -> AttemptResult:
        """Follow the ranks until they have ended, or this host is stopped."""

    def predict_adapting(self) -> dict[str, Any] | None:
        """Prediction of what adapting would give, for the report."""
        return None

    def serve(self) -> int:
        """Host the control loop until the ranks have ended; with a command, run it meanwhile.

        Returns the exit status: 0 completed, 1 not completed, 130 interrupted; that of the command,
        unless it is 0. Raises :class:`InputError` before anything is served if an option is
        invalid. Call it from the main thread.
        """
        host, port = parse_listen(self.options.listen)
        check_command(self.options)
        note, status = self.progress.print_note, 0
        with ExitStack() as outer:
            try:
                with self.stack:
                    self._open(host, port, outer)
                    with ExitStack() as self._following:
                        if self.command is not None:
                            self._following.callback(self.command.end)
                        ending = self.follow_ranks()
                    if self.command is not None and ending.outcome is not AttemptOutcome.DEADLINE:
                        status = self.command.exit_code
                    if self.run is not None:
                        conclude_run(self.run, ending, self.journal, self.service, note)
                        self.run.adapting = self.predict_adapting()
                        self._concluded = True
                        if self._page is not None:
                            self._page.announce_end()
            except InputError:
                raise
            except Exception as error:  # The ranks train on; the report is written.
                if self.run is None:
                    raise
                ending = record_host_failure(self.run, self.journal, error, self.folder)
            status = status or EXIT_STATUS[ending.outcome]
            if self.run is None:
                why = f"; {ending.reason}" if self.options.command else ""
                note(f"{ending.outcome.value}: no step was observed{why}")
                return status
            complete = self.folder is None or write_results(
                self.folder, self.run, self.journal, self.traces, COMMAND
            )
        lines = [self.run.format_summary()]
        if self.folder is not None and complete:
            lines.append(f"report: {self.folder.report}; page: pipemorph view {self.folder.root}")
        if ending.outcome is not AttemptOutcome.COMPLETED:
            # Last, as a launcher prints much before it.
            lines.append(ending.format_lines())
        note("\n".join(lines))
        return status if complete else status or UNWRITTEN_STATUS

    def _open(self, host: str, port: int, outer: ExitStack) -> None:
        """Begin to serve: everything up to the start of the command. ``outer``: releases the folder
        after the report is written."""
        stack, note, observes = self.stack, self.progress.print_note, self.run is None
        stack.enter_context(self._interrupts)
        if self.options.command:
            self.command, self.options = prepare_command(self.options, host, stack)
        options = self.options
        assert options.token_file is not None
        tls = make_tls_context(options, host)
        token = load_or_create_secret(options.token_file, "--token-file")
        if not observes:
            assert options.secret_file is not None
            load_or_create_secret(options.secret_file, "--secret-file")
        stack.callback(self.progress.close)
        self._refresh = stack.enter_context(collect_logs(self.progress))
        self.service = self.make_service(token=token, host=host, port=port, tls=tls)
        try:
            stack.enter_context(self.service)
        except OSError as error:
            raise InputError(
                f"--listen {one_line(options.listen)} cannot be used: {error.strerror or error}"
            ) from None
        start_metrics(options, self.service, stack, note)
        if options.watch is not None:
            self._listener = stack.enter_context(open_page_listener(options.watch))
        if options.out:
            self.folder = outer.enter_context(
                ResultFolder.claim_folder(options.out, force=options.force)
            )
        variables = build_served_environment(self.service.url, options, observe=observes)
        if options.env_file is not None:
            write_env_file(options.env_file, variables)
        if self.run is not None:
            note(format_job_headline(self.run.job))
        if self.command is None:
            note(format_rank_environment(variables))
        else:
            if is_loopback(host) and not observes:
                # All ranks are on this machine, whose name may resolve to another address.
                variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
            self.command.start(variables)

    def start_views(self, traces: TraceSource, no_ops: str = "") -> None:
        """Write the status of :attr:`run`, and serve its live page, until its end: as far as the
        options name a folder and a port. ``no_ops``: reason for missing ops."""
        assert self.run is not None
        source = LivePageSource(
            self.run.job, self.journal, traces, self.read_run_state, no_ops=no_ops,
            result="report.json of its folder" if self.folder else f"the output of {COMMAND}",
        )  # fmt: skip
        if self.folder is not None:
            self._following.enter_context(StatusFile(self.folder, source.collect_state))
        if self._listener is None:
            return
        page = LivePageServer(source.make_document, self._listener)
        self._page = self.stack.enter_context(page)
        self.progress.print_note(f"watch: {page.url}")

    def read_run_state(self) -> RunState:
        """State of the ranks, for the live page. Called from another thread."""
        run = self.run
        assert run is not None
        if self._concluded:
            return read_final_state(run)
        state = self.service.read_state()
        ended = run.attempts[-1].result if run.attempts else None
        if ended is not None:
            status = state.to_status("Restarting", ended.reason)
        else:
            starts = self.journal.view.state == "starting"
            status = state.to_status("Starting" if starts else "Running")
        return RunState(status, state.outlook)

    def wait_for_signal(self) -> signal.Signals | None:
        """Wait a short time for a signal, which is forwarded to the command; show progress."""
        stopped = None
        with contextlib.suppress(Empty):
            event = self.events.get(timeout=REFRESH_SECONDS)
            stopped = event.number if isinstance(event, SignalReceived) else None
        self._refresh()
        if stopped is not None and self.command is not None:
            self.command.send_signal(stopped)
        return stopped


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


def build_served_environment(url: str, options: ServeOptions, *, observe: bool) -> dict[str, str]:
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
