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
from typing import Any

from pydantic import BaseModel, ConfigDict

from pipemorph.api.mesh import MeshShape
from pipemorph.control.observe.merge import ranks_of_part
from pipemorph.errors import InputError
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.topology.addresses import own_address

log = logging.getLogger("pipemorph.agent")

SHARED_RANKS = 64
"""Ranks of each part where a pod is no part: what one agent judges is bounded so, whatever the
mesh."""
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
    ingest_url: str | None = None
    token_file: Path | None = None
    listen_fd: int
    parent: int
    again: bool = False
    """Whether another agent ran before this one."""
    part: int | None = None
    """Number of the part of the job that this agent observes; None: it is the job's agent."""
    part_ranks: int = 0
    """Ranks of each part, if agents of their own observe parts of the job; else 0."""
    upstream: tuple[str, int] | None = None
    """Address of the job's agent, for the agent of a part."""

    @property
    def ranks(self) -> range:
        """The ranks that connect to this agent."""
        if not self.part_ranks:
            return range(self.mesh.world_size)
        return ranks_of_part(self.mesh, self.part or 0, self.part_ranks)


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


def part_ranks(places: Sequence[tuple[int, int]]) -> int:
    """Ranks of each part of a job that agents of their own observe, from the places of all ranks:
    each one's local rank, and the ranks of its pod. A part is a pod; where pods have one rank, or
    differ, it is :data:`SHARED_RANKS` ranks, the last of all parts maybe fewer. 0 if the job has
    one part: one pod, or no more ranks than that."""
    local = places[0][1]
    fits = all(place == (rank % local, local) for rank, place in enumerate(places))
    ranks = local if fits and local > 1 else SHARED_RANKS
    return ranks if ranks < len(places) else 0


def start_agent(context: TrainerContext, mesh: MeshShape, *, part_ranks: int = 0) -> AgentHandle:
    """Start the job's agent beside this rank and return at once. ``mesh``: that of the job's ranks.
    ``part_ranks``: of each part, if those beside this rank's have agents of their own.

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
    return _start(
        context, mesh, context.master_addr,
        ingest_url=context.ingest_url, token_file=context.token_file, part_ranks=part_ranks,
    )  # fmt: skip


def start_part_agent(
    context: TrainerContext, mesh: MeshShape, *, part_ranks: int, upstream: tuple[str, int]
) -> AgentHandle:
    """Start the agent of this rank's part beside it, as :func:`start_agent` does. It serves the
    ranks of this machine, or of as many, and reports to the job's agent at ``upstream``. Raises
    :class:`PipelineError` if other machines cannot reach this one."""
    alone = part_ranks == context.local_world_size
    return _start(
        context, mesh, "127.0.0.1" if alone else own_address(context.master_addr),
        part=context.rank // part_ranks, part_ranks=part_ranks, upstream=upstream,
    )  # fmt: skip


def _start(context: TrainerContext, mesh: MeshShape, address: str, **fields: Any) -> AgentHandle:
    listener, host = _listener(address)
    config = AgentConfig(
        job=context.job.metadata.name if context.job else "job",
        namespace=context.namespace,
        attempt=context.attempt,
        mesh=mesh,
        secret_hex=context.secret.hex(),
        listen_fd=listener.fileno(),
        parent=os.getpid(),
        **fields,
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
