"""Runs a benchmark's own file as the ranks of a job on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hold_port() -> Iterator[int]:
    """Loopback port that no other program gets during the context. A store with SO_REUSEADDR may
    listen there, because the holder shares the port and does not listen."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def run_ranks(file: str, world: int, arguments: list[str], deadline_seconds: float) -> str:
    """Run ``python FILE --rank ARGUMENTS`` on ``world`` local ranks; return rank 0's output.

    Raises RuntimeError if a rank fails (its stderr is passed on) and
    :class:`subprocess.TimeoutExpired` after ``deadline_seconds``.
    """
    with hold_port() as port:
        return _run_ranks(file, world, arguments, deadline_seconds, port)


def _run_ranks(
    file: str, world: int, arguments: list[str], deadline_seconds: float, port: int
) -> str:
    environ = {
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, file, "--rank", *arguments],
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        out, _ = ranks[0].communicate(timeout=deadline_seconds)
        codes = [rank.wait(30) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}; their output is above")
    return out
