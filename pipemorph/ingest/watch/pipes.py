"""Starts and ends the process that makes pages, and frames what is sent to it over pipes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys

READ_BYTES = 1 << 20
"""Output of the process that is buffered before its pipe blocks: twice as much."""
HEADER_BYTES = 8


def frame(value: object) -> bytes:
    """A pickled value, preceded by its length."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(HEADER_BYTES, "big") + data


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
