"""Process of the job's agent, as rank 0 starts it, restarts it and ends it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from pipemorph.errors import InputError
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.topology.addresses import is_loopback

log = logging.getLogger("pipemorph.agent")

BACKLOG = 4096
"""Connections that the kernel queues while the agent is starting."""
LAST_REPORT_SECONDS = 5.0
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 1.0, 60.0
"""Pause between two starts of the agent: the first one, and the longest."""
AGENT = (sys.executable, "-m", "pipemorph_trainer.agent")


class AgentConfig(BaseModel):
    """Configuration of the agent. It is sent to standard input, since argv must not contain a
    secret."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: str
    namespace: str
    attempt: int
    mesh: MeshShape
    secret_hex: str
    ingest_url: str
    token_file: Path | None = None
    listen_fd: int
    parent: int
    is_restarted: bool = False
    """True if another agent ran before this one."""


class AgentProcess:
    """The running agent process, and its successors if it ends early.

    ``host`` and ``port``: its address for the ranks. This process holds the listening socket, so
    the next agent has the same address, and ranks that connect meanwhile just wait.
    """

    def __init__(
        self,
        config: AgentConfig,
        listener: socket.socket,
        host: str,
        *,
        command: Sequence[str] = AGENT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._listener = listener
        self._command = command
        self._clock = clock
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._ended = False
        self._pause = FIRST_PAUSE_SECONDS
        self._started_at = 0.0
        self.process = self._start_process()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def restart_if_ended(self) -> None:
        """Restart the agent if it has ended unexpectedly. Never blocks.

        Call it regularly, from the thread that started the agent: no other code notices the end,
        since the ranks train on with the current plan. If agents end soon, the pauses grow up to a
        minute.
        """
        if self.alive:
            return
        lasted = self._clock() - self._started_at
        if not self._ended:
            self._ended = True
            if lasted > LAST_PAUSE_SECONDS:
                self._pause = FIRST_PAUSE_SECONDS
            log.warning(
                "the agent has ended (%s): nothing is reported or adapted until another runs, "
                "training goes on with the current plan; the agent's messages are in this log",
                _describe_exit(self.process.returncode),
            )
        if lasted < self._pause:
            return
        self._pause = min(2 * self._pause, LAST_PAUSE_SECONDS)
        self._close_stdin()
        self._config = self._config.model_copy(update={"is_restarted": True})
        try:
            self.process = self._start_process()
        except OSError as error:
            # As if the agent had ended at once: it is restarted after a pause.
            log.warning("the agent cannot be started again: %s", error)
            return
        self._ended = False
        log.warning("the agent has been started again")

    def close(self, timeout: float = LAST_REPORT_SECONDS) -> None:
        """Let the agent send its last report and end; kill it after ``timeout`` seconds."""
        self._listener.close()
        self._close_stdin()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _start_process(self) -> subprocess.Popen[bytes]:
        self._started_at = self._clock()
        listen_fd = self._listener.fileno()
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, pass_fds=[listen_fd])
        assert process.stdin is not None
        # If the process has already ended, the next restart_if_ended() notices.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(self._config.model_dump_json().encode() + b"\n")
            process.stdin.flush()
        return process

    def _close_stdin(self) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()


def _describe_exit(code: int) -> str:
    """Describe the return ``code`` of :class:`subprocess.Popen`: an exit status or a signal."""
    if code >= 0:
        return f"exit {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def start_agent(context: TrainerContext, mesh: MeshShape) -> AgentProcess:
    """Start the job's agent next to this rank and return at once. ``mesh``: that of the job.

    The agent inherits the listening socket, so the port is known before the agent runs, and ranks
    that connect early just wait. The agent ends with this process: its standard input closes, and
    the kernel sends it a signal.

    Call it from the main thread, since the kernel ties the signal to the calling thread. Raises
    :class:`InputError` without an ingest URL or a secret, and OSError if no socket is available.
    """
    if context.ingest_url is None:
        raise InputError("PIPEMORPH_INGEST_URL is not set; the agent needs an ingest")
    if not context.secret:
        raise InputError("PIPEMORPH_SECRET_FILE is not set; the agent authenticates ranks by it")
    listener, host = _open_listener(context.master_addr)
    config = AgentConfig(
        job=context.job.metadata.name if context.job else "job",
        namespace=context.namespace,
        attempt=context.attempt,
        mesh=mesh,
        secret_hex=context.secret.hex(),
        ingest_url=context.ingest_url,
        token_file=context.token_file,
        listen_fd=listener.fileno(),
        parent=os.getpid(),
    )
    try:
        return AgentProcess(config, listener, host)
    except OSError:
        listener.close()
        raise


def _open_listener(master_addr: str) -> tuple[socket.socket, str]:
    """Listening socket, and the host to connect to: the loopback device if ``master_addr`` is
    one."""
    loopback = "127.0.0.1" if master_addr == "localhost" else master_addr
    if is_loopback(loopback):
        family = socket.AF_INET6 if ":" in loopback else socket.AF_INET
        return socket.create_server((loopback, 0), family=family, backlog=BACKLOG), loopback
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
        )
    else:
        listener = socket.create_server(("", 0), backlog=BACKLOG)
    return listener, master_addr
