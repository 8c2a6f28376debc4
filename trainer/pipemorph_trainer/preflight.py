"""``python -m pipemorph_trainer.preflight [--rdma] [--memlock] [--shm=BYTES] -- COMMAND…``

Checks that the pod has the resources that the job's placement requests, then executes COMMAND.
Without this check a missing device or a memory limit would look like a slow link, since the engine
falls back to TCP.

Exits with 78 and a line per fault, also in the pod's termination message. The operator shows it as
the condition PreflightPassed=False.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pipemorph.argument_types import whole_number_type
from pipemorph.doctor.host import LEAST_LOCKED_BYTES, read_locked_memory_limit
from pipemorph.doctor.host import has_ipc_lock as _may_lock

EXIT_UNFIT = os.EX_CONFIG
TERMINATION_LOG = Path("/dev/termination-log")
DEVICES = Path("/dev/infiniband")
SHARED_MEMORY = Path("/dev/shm")


def find_faults(
    *,
    rdma: bool,
    memlock: bool,
    shm_bytes: int | None,
    devices: Path = DEVICES,
    locked_limit: Callable[[], int] = read_locked_memory_limit,
) -> list[str]:
    """Find the faults of this pod, a line each; empty if there is none."""
    found = []
    if rdma and not any(devices.glob("uverbs*")):
        found.append(
            f"no RDMA device: {devices} has no uverbs; check the device plugin and"
            " placement.rdma.resourceName"
        )
    if memlock:
        limit = locked_limit()
        if limit != resource.RLIM_INFINITY and limit < LEAST_LOCKED_BYTES and not _may_lock():
            found.append(
                f"locked memory is limited to {limit} bytes, RDMA needs {LEAST_LOCKED_BYTES};"
                " raise LimitMEMLOCK of the container runtime, or run as user 0 (Kubernetes gives"
                " IPC_LOCK to no other), or set placement.rdma.ipcLock: false to do without"
            )
    if shm_bytes is not None:
        stat = os.statvfs(SHARED_MEMORY)
        size = stat.f_frsize * stat.f_blocks
        if size < shm_bytes:
            found.append(
                f"{SHARED_MEMORY} holds {size} bytes, the job requests {shm_bytes}; is another"
                " volume mounted there?"
            )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="preflight", description=__doc__)
    parser.add_argument("--rdma", action="store_true")
    parser.add_argument("--memlock", action="store_true")
    parser.add_argument("--shm", type=whole_number_type(0), metavar="BYTES")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    found = find_faults(rdma=options.rdma, memlock=options.memlock, shm_bytes=options.shm)
    if found:
        text = "\n".join(found) + "\n"
        sys.stderr.write(text)
        if TERMINATION_LOG.exists():
            TERMINATION_LOG.write_text(text)
        raise SystemExit(EXIT_UNFIT)
    try:
        os.execvp(options.command[0], options.command)
    except OSError as error:
        sys.stderr.write(f"{options.command[0]}: cannot be run: {error.strerror}\n")
        raise SystemExit(EXIT_UNFIT) from None


if __name__ == "__main__":
    main()
