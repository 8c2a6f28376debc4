"""Rank 0's side of the agent's life: start it, and see it out at the end."""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from pipemorph.errors import InputError
from pipemorph_trainer.context import TrainerContext

log = logging.getLogger("pipemorph.agent")

BACKLOG = 4096
"""Ranks may dial before the agent has finished starting; the kernel holds them here."""
LAST_REPORT_SECONDS = 5.0


class AgentConfig(BaseModel):
    """All the agent needs, sent down its standard input: a secret has no place in argv."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: str
    namespace: str
    attempt: int
    world_size: int
    secret_hex: str
    ingest_url: str
    token_file: Path | None
    listen_fd: int
    parent: int


@dataclass
class AgentHandle:
    """A running agent. ``host`` and ``port`` are where the ranks reach it."""

    host: str
    port: int
    process: subprocess.Popen[bytes]
    told: bool = False

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def tell_end(self) -> None:
        """Warn, once, if the agent has ended although nobody asked it to: the ranks train on as
        if nothing were wrong, so nobody else would say so. Never blocks."""
        if self.told or self.alive:
            return
        self.told = True
        log.warning(
            "the agent has ended (%s): nothing is reported or adapted any more, training goes on "
            "with the plan in force; what it said before is in this log",
            _how(self.process.returncode),
        )

    def close(self, timeout: float = LAST_REPORT_SECONDS) -> None:
        """Let the agent send its last report and end; kill it after ``timeout`` seconds."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _how(code: int) -> str:
    """How a process ended, of its return code as in :class:`subprocess.Popen`."""
    if code >= 0:
        return f"exit {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def start_agent(context: TrainerContext) -> AgentHandle:
    """Start the agent beside this rank and return at once.

    The listening socket is made here and inherited, so the port is known before the agent
    is up and ranks that dial early just wait. The agent ends with this process: its
    standard input is a pipe that closes, and the kernel signals it.

    Call it from the main thread (the kernel ties the signal to the calling thread). Raises
    :class:`InputError` without an ingest URL or a secret, OSError if no socket is to be had.
    """
    if context.ingest_url is None:
        raise InputError("PIPEMORPH_INGEST_URL is not set; there is nobody for an agent to talk to")
    if not context.secret:
        raise InputError("PIPEMORPH_SECRET_FILE is not set; the agent lets in who holds the secret")
    listener, host = _listener(context.master_addr)
    with listener:
        config = AgentConfig(
            job=context.job.metadata.name if context.job else "job",
            namespace=context.namespace,
            attempt=context.attempt,
            world_size=context.world_size,
            secret_hex=context.secret.hex(),
            ingest_url=context.ingest_url,
            token_file=context.token_file,
            listen_fd=listener.fileno(),
            parent=os.getpid(),
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "pipemorph_trainer.agent"],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
        port = listener.getsockname()[1]
    assert process.stdin is not None
    process.stdin.write(config.model_dump_json().encode() + b"\n")
    process.stdin.flush()
    return AgentHandle(host, port, process)


def _listener(master_addr: str) -> tuple[socket.socket, str]:
    """A listening socket and the host to dial: this machine only where there is only one."""
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
