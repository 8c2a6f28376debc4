"""``python -m pipemorph_trainer.preflight [--rdma] [--memlock] [--shm=BYTES] [--fabric=report
[--device=mlx5_0] [--gid-index=3]] -- COMMAND…``

Checks that the pod has what the job's placement requests, then executes COMMAND. Without this check
a missing device or a memory limit would look like a slow link, since the engine falls back to TCP.

With ``--fabric``, the job's pods probe the RDMA ports between them (see
:mod:`pipemorph.fabric.check.pods`). The first one hands what was found to rank 0's agent in the
environment, and with ``--fabric=require`` fails if anything is sick.

Exits with 78 and one line per fault, also in the pod's termination message. The operator shows it
as the condition PreflightPassed=False.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from pipemorph.discovery.host import LEAST_LOCKED_BYTES, locked_limit
from pipemorph.discovery.host import may_lock as _may_lock
from pipemorph.errors import InputError, one_line
from pipemorph.fabric.check.end import Host
from pipemorph.fabric.check.job_view import MOST_TEXT, view_of
from pipemorph.fabric.check.pods import NoCheck, Place, check_pods
from pipemorph.fabric.check.report import headline, lines
from pipemorph.wire import FABRIC_VARIABLE, FabricView

EXIT_UNFIT = os.EX_CONFIG
TERMINATION_LOG = Path("/dev/termination-log")
DEVICES = Path("/dev/infiniband")
SHARED_MEMORY = Path("/dev/shm")


def faults(
    *,
    rdma: bool,
    memlock: bool,
    shm_bytes: int | None,
    devices: Path = DEVICES,
    locked_limit: Callable[[], int] = locked_limit,
) -> list[str]:
    """Faults of this pod, one line each; empty if there is none."""
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
                f"{SHARED_MEMORY} holds {size} bytes, the job asked for {shm_bytes}; is another"
                " volume mounted there?"
            )
    return found


def check_fabric(
    environ: Mapping[str, str], mode: str, make_host: Callable[[], Host] = Host
) -> tuple[FabricView | None, list[str]]:
    """Take part in the check of the job's RDMA ports. Returns the result, None in pods but the
    first, and the faults: none unless ``mode`` is ``require``."""
    try:
        place, ranks_per_pod = _place(environ)
        result = check_pods(place, make_host=make_host)
    except (InputError, NoCheck) as error:
        text = f"the check of the RDMA ports was not made: {error}"
        sys.stderr.write(text + "\n")
        return FabricView(message=one_line(text, MOST_TEXT)), [text] if mode == "require" else []
    if result is None:
        return None, []
    sys.stderr.write("".join(f"{line}\n" for line in [headline(result), *lines(result)]))
    view = view_of(result, ranks_per_pod=ranks_per_pod, at=time.time())
    return view, lines(result) if mode == "require" else []


def _place(environ: Mapping[str, str]) -> tuple[Place, int]:
    """This pod's place in its job, and the ranks of a pod. Raises :class:`InputError`."""
    found = {}
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "PIPEMORPH_SECRET_FILE"):
        if not environ.get(name):
            raise InputError(f"{name} is not set; the operator sets it")
        found[name] = environ[name]
    index = environ.get("PIPEMORPH_POD_INDEX") or environ.get("RANK") or ""
    numbers = (index, found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"])
    if not all(text.isdecimal() for text in numbers):
        raise InputError(f"pod, WORLD_SIZE and LOCAL_WORLD_SIZE are {numbers}; expected numbers")
    try:
        secret = Path(found["PIPEMORPH_SECRET_FILE"]).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise InputError(f"PIPEMORPH_SECRET_FILE cannot be read: {error}") from None
    size = max(1, int(found["LOCAL_WORLD_SIZE"]))
    count = int(found["WORLD_SIZE"]) // size
    return Place(int(index), count, found["MASTER_ADDR"], secret), size


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="preflight", description=__doc__)
    parser.add_argument("--rdma", action="store_true")
    parser.add_argument("--memlock", action="store_true")
    parser.add_argument("--shm", type=int, metavar="BYTES")
    parser.add_argument("--fabric", choices=["report", "require"])
    parser.add_argument("--device", action="append", default=[])
    parser.add_argument("--gid-index", type=int)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    found = faults(rdma=options.rdma, memlock=options.memlock, shm_bytes=options.shm)
    if options.fabric is not None and not found:
        fabric, found = check_fabric(
            os.environ, options.fabric, lambda: Host(options.device, options.gid_index)
        )
        if fabric is not None:
            os.environ[FABRIC_VARIABLE] = TypeAdapter(FabricView).dump_json(fabric).decode()
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
