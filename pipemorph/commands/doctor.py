"""``pipemorph doctor``: checks this host or pod for jobs, and advises what to fix."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

from pipemorph.commands.output_file import write_output

STYLES = {"ok": "green", "missing": "bold red", "warning": "yellow", "absent": "dim"}
"""Styles of rows by verdict."""
COLUMNS = 100
"""Width of text that is not for a terminal, such as a pod's log: advice is long."""
TRAINER_SECONDS = 120.0
"""Time limit of the trainer query: importing torch from a cold disk is slow."""


def add_parser(subparsers: Any) -> None:
    from pipemorph.doctor.checks import NEEDS

    parser = subparsers.add_parser(
        "doctor",
        help="check this host or pod, and advise what to fix",
        description="Check RDMA devices, limits, memory and GPUs, and advise what to fix. "
        "Exit status: 1 if something that --require names is missing, else 0.",
    )
    parser.add_argument(
        "--require",
        action="append",
        choices=NEEDS,
        default=[],
        help="what the job requires; repeatable",
    )
    parser.add_argument(
        "--output", choices=["text", "json"], default="text", help="default: %(default)s"
    )


def run(args: argparse.Namespace) -> int:
    # Imported late: other subcommands do not need it.
    from pipemorph.doctor.checks import run_checks
    from pipemorph.terminal import make_table, render_parts

    found = gather_facts()
    lines = run_checks(found, frozenset(args.require))
    missing = [line.name for line in lines if line.verdict == "missing"]
    if args.output == "json":
        said = {
            "ok": not missing,
            "required": sorted(args.require),
            "missing": missing,
            "checks": [dataclasses.asdict(line) for line in lines],
            "devices": None
            if found.devices is None
            else [_device_to_json(d) for d in found.devices],
        }
        text = json.dumps(said, indent=1) + "\n"
    else:
        rows = [[line.verdict, line.name, line.found, line.advice] for line in lines]
        found_here = make_table(["verdict", "what", "found", "what to do"], rows, styles=STYLES)
        text = render_parts(
            found_here,
            *(["", f"missing: {', '.join(missing)}"] if missing else []),
            plain_columns=COLUMNS,
        )
    write_output(text.encode(), None)
    return 1 if missing else 0


def _device_to_json(device: Any) -> dict[str, Any]:
    """A device as JSON. Unreadable values are "unavailable": null is easily mistaken for 0."""
    from pipemorph.doctor.checks import UNAVAILABLE

    fields = dataclasses.asdict(device)
    if fields["numa_node"] is None:
        fields["numa_node"] = UNAVAILABLE
    for port in fields["ports"]:
        port["active_mtu"] = port["active_mtu"] or UNAVAILABLE
        port["counters"] = {
            name: UNAVAILABLE if n is None else n for name, n in port["counters"].items()
        } or UNAVAILABLE
    return fields


def gather_facts() -> Any:
    """Inspect this host: :class:`pipemorph.doctor.checks.HostFacts`."""
    from pipemorph.doctor import host, numa, rdma, verbs
    from pipemorph.doctor.checks import HostFacts

    seen = verbs.probe_verbs()
    trainer, error = query_trainer_facts()
    devices = rdma.read_devices()
    # A software device has no NUMA node.
    nodes = {device.name: device.numa_node for device in devices or () if device.pci}
    for i, gpu in enumerate(trainer["gpus"] if trainer else ()):
        nodes[f"GPU {i}"] = numa.read_numa_node(numa.PCI / gpu["pci"])
    return HostFacts(
        devices=verbs.add_active_mtus(devices, seen),
        numa=numa.read_numa_topology(nodes),
        verbs=seen,
        uverbs=host.list_verbs_devices(),
        locked_bytes=host.read_locked_memory_limit(),
        may_lock=host.has_ipc_lock(),
        huge_pages=host.read_huge_pages(),
        transparent_huge_pages=host.read_transparent_huge_pages(),
        shared_memory=host.measure_shared_memory(),
        modules=host.list_loaded_modules(),
        trainer=trainer,
        trainer_error=error,
    )


def query_trainer_facts() -> tuple[dict[str, Any] | None, str | None]:
    """Facts from torch and the engine, or an error; queried in a separate process."""
    command = [sys.executable, "-m", "pipemorph_trainer.devices"]
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=TRAINER_SECONDS,
            env=os.environ,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()
        return None, last[-1] if last else f"exit status {done.returncode}"
    return json.loads(done.stdout), None
