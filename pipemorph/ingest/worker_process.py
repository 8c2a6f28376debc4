"""Starts and ends the worker processes of a host: children that it talks to over pipes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

READ_BYTES = 1 << 20
"""Of a worker's output that is kept before the pipe waits: twice as much."""


async def start(module: str, nice: int) -> asyncio.subprocess.Process:
    """A process that runs a module with pipes to its standard input and from its standard output.
    ``nice``: added to the niceness of this process. Raises OSError."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=READ_BYTES,
    )
    with contextlib.suppress(ProcessLookupError):  # Told by the request that it fails.
        os.setpriority(os.PRIO_PROCESS, process.pid, os.nice(0) + nice)
    return process


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill it, if it has not exited, and wait until it has."""
    if process.returncode is None:
        # Not process.kill(): it polls, and could reap the exit status that asyncio waits for.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    await process.wait()
