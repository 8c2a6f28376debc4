"""The command after ``pipemorph serve JOB --``, such as torchrun: it starts the ranks that are
served.

It gets the addresses and secrets of the job in its environment. It has a session of its own, so a
Ctrl-C at the terminal reaches only this host, which forwards it. If this host is killed, the
processes that the command has started on this machine are killed, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipemorph.errors import InputError, one_line
from pipemorph.local.processes.fork_client import SPAWN
from pipemorph.local.processes.locked_folder import TemporaryFolder
from pipemorph.local.processes.ranks import Reaper

FOLDER_VARIABLE = "PIPEMORPH_SERVE_DIR"
"""Variable of the command with the private folder, by which the reaper finds its processes."""
ERROR_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Variable with the file for an uncaught error. torchrun copies that of the first rank that failed
to its own; without torchrun the ranks write it."""
END_SECONDS = 40.0
"""Time from SIGTERM to SIGKILL: torchrun gives its ranks 30 s."""
POLL_SECONDS = 0.05
OPENSSL_SECONDS = 60.0
CERTIFICATE_DAYS = "365"
LONGEST_REASON = 2000


class LaunchedCommand:
    """Command and its private folder. A context manager: on exit, the command and the processes
    that it has started on this machine are gone."""

    def __init__(self, argv: Sequence[str], folder: TemporaryFolder) -> None:
        self.argv = list(argv)
        self._folder = folder
        self._error_file = folder.root / "error.json"
        self._process: subprocess.Popen[bytes] | None = None
        self._reaper = Reaper()
        self._reaper.send("delete", str(folder.root))

    def __enter__(self) -> LaunchedCommand:
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()
        # With a non-empty list it kills what the command has left, and deletes the folder.
        self._reaper.close()
        if self._process is not None:
            self._process.wait()
        self._folder.remove()

    def start(self, variables: Mapping[str, str]) -> None:
        """Start it with these environment variables. Call from the main thread: the kernel kills
        the command when the thread that started it exits."""
        env = {
            **os.environ,
            **variables,
            FOLDER_VARIABLE: str(self._folder.root),
            ERROR_VARIABLE: str(self._error_file),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(SPAWN), str(os.getpid()), *self.argv],
            stdin=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )
        self._reaper.send("watch", self._process.pid)

    @property
    def status(self) -> int | None:
        """Exit code, or minus the signal; None while it runs. It stays a zombie, so that the id of
        its process group is not reused before the reaper has used it."""
        assert self._process is not None
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    @property
    def exit_code(self) -> int:
        """Exit code, as a shell reports it: 128 + the signal of a command that was killed."""
        status = self.status
        assert status is not None
        return status if status >= 0 else 128 - status

    def send_signal(self, number: signal.Signals) -> None:
        """Forward a signal of this host. A closed standard output ends the command."""
        if self._process is not None and self.status is None:
            number = signal.SIGTERM if number is signal.SIGPIPE else number
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def end(self) -> None:
        """End the command: SIGTERM, and SIGKILL after :data:`END_SECONDS`."""
        if self._process is None:
            return
        self.send_signal(signal.SIGTERM)
        end = time.monotonic() + END_SECONDS
        while self.status is None and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def describe_exit(self) -> str:
        """``torchrun exited with code 1: rank 0: ValueError: …``, with the error of the first rank
        that failed, if one has written it."""
        status, name = self.status, Path(self.argv[0]).name
        if status is None:
            return f"{name} is running"
        how = f"exited with code {status}" if status >= 0 else f"was killed by {_name(-status)}"
        reason = self._read_reason() if status else ""
        return f"{name} {how}{': ' if reason else ''}{reason}"

    def _read_reason(self) -> str:
        try:
            message = json.loads(self._error_file.read_text())["message"]
        except (OSError, ValueError, KeyError, TypeError):
            return ""
        if not isinstance(message, dict):
            return one_line(str(message), LONGEST_REASON)
        extra = message.get("extraInfo")
        rank = extra.get("rank") if isinstance(extra, dict) else None
        place = "" if rank is None else f"rank {rank}: "
        return one_line(f"{place}{message.get('message')}", LONGEST_REASON)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def check_slurm_step(environ: Mapping[str, str] = os.environ) -> None:
    """Raise :class:`InputError` if srun has started several of these hosts."""
    if environ.get("SLURM_STEP_NUM_TASKS", "1") not in ("", "1"):
        raise InputError(
            f"srun starts this {environ['SLURM_STEP_NUM_TASKS']} times, and one has to serve all "
            "ranks; put srun after it: pipemorph serve JOB --listen 0.0.0.0:0 -- srun torchrun …"
        )


def make_certificate(host: str, cert: Path, key: Path) -> None:
    """Make a certificate for ``host``, a name or an IP address, that is its own authority. PEM
    files. Raises :class:`InputError` if openssl cannot."""
    kind = "DNS"
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, host)
            kind = "IP"
    why = ""
    try:
        done = subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
             "ec_paramgen_curve:prime256v1", "-nodes", "-days", CERTIFICATE_DAYS,
             "-subj", "/CN=pipemorph", "-addext", f"subjectAltName={kind}:{host}",
             "-out", str(cert), "-keyout", str(key)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=OPENSSL_SECONDS,
            check=False,
        )  # fmt: skip
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no message"])[-1]
    except OSError as error:
        why = str(error.strerror)
    except subprocess.TimeoutExpired:
        why = f"no answer in {OPENSSL_SECONDS:g} s"
    if why:
        raise InputError(
            f"openssl cannot make a certificate for {one_line(host)}: {one_line(why)}; give "
            "--tls-cert and --tls-key, or listen at 127.0.0.1"
        )


def format_environment(variables: Mapping[str, str]) -> str:
    """Lines of a shell that export these variables."""
    return "".join(f"export {name}={shlex.quote(v)}\n" for name, v in variables.items())
