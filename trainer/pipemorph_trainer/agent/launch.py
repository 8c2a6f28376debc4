"""Starts an agent beside a rank, restarts it, and ends it."""

from __future__ import annotations

import contextlib
import ipaddress
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

from pipemorph.api.mesh import MeshShape
from pipemorph.errors import InputError
from pipemorph_trainer.context import TrainerContext

log = logging.getLogger("pipemorph.agent")

BACKLOG = 4096
"""Connections that the kernel queues while the agent is starting."""
LAST_REPORT_SECONDS = 5.0
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 1.0, 60.0
"""Between two starts of the agent."""
AGENT = (sys.executable, "-m", "pipemorph_trainer.agent")


class AgentConfig(BaseModel):
    """The agent's configuration. Sent to its standard input, since argv must not contain a
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
    again: bool = False
    """Whether another agent ran before this one."""


class AgentHandle:
    """The running agent, and its successors if it ends early.

    ``host`` and ``port``: its address for the ranks. The listening socket stays open here, so that
    the next agent uses the same address, and ranks that connect meanwhile just wait.
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
        self.process = self._start()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def tend(self) -> None:
        """Start the agent again if it has ended unexpectedly. Never blocks.

        Nothing else would notice, since the ranks keep training with the current plan. Call it
        regularly, from the thread that started the agent. If agents end soon, the pauses grow up to
        a minute.
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
                _how(self.process.returncode),
            )
        if lasted < self._pause:
            return
        self._pause = min(2 * self._pause, LAST_PAUSE_SECONDS)
        self._hang_up()
        self._config = self._config.model_copy(update={"again": True})
        try:
            self.process = self._start()
        except OSError as error:
            # Handled like an agent that ended at once: tried again after a pause.
            log.warning("the agent cannot be started again: %s", error)
            return
        self._ended = False
        log.warning("the agent has been started again")

    def close(self, timeout: float = LAST_REPORT_SECONDS) -> None:
        """Let the agent send its last report and end; kill it after ``timeout`` seconds."""
        self._listener.close()
        self._hang_up()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        self._started_at = self._clock()
        listen_fd = self._listener.fileno()
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, pass_fds=[listen_fd])
        assert process.stdin is not None
        # If it has ended already, the next call of tend() notices.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(self._config.model_dump_json().encode() + b"\n")
            process.stdin.flush()
        return process

    def _hang_up(self) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()


def _how(code: int) -> str:
    """How a process ended, from the return code of :class:`subprocess.Popen`."""
    if code >= 0:
        return f"exit {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def start_agent(context: TrainerContext, mesh: MeshShape) -> AgentHandle:
    """Start the job's agent beside this rank and return at once. ``mesh``: that of the job's ranks.

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
    listener, host = _listener(context.master_addr)
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
        return AgentHandle(config, listener, host)
    except OSError:
        listener.close()
        raise


def _listener(master_addr: str) -> tuple[socket.socket, str]:
    """A listening socket, and the host to connect to. On a single machine only the loopback
    device."""
    loopback = "127.0.0.1" if master_addr == "localhost" else master_addr
    if _is_loopback(loopback):
        family = socket.AF_INET6 if ":" in loopback else socket.AF_INET
        return socket.create_server((loopback, 0), family=family, backlog=BACKLOG), loopback
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
        )
    else:
        listener = socket.create_server(("", 0), backlog=BACKLOG)
    return listener, master_addr


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
