"""``pipemorph bench link``: measures the link between two hosts or processes."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from pipemorph.argument_types import (
    LONGEST_SECONDS,
    add_port_arguments,
    check_devices,
    number_type,
    whole_number_type,
)
from pipemorph.doctor.host import usable_memory_bytes
from pipemorph.errors import InputError, one_line
from pipemorph.extras import require_trainer

SIZES = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
TRANSPORTS = ("tcp", "shm", "rdma", "gloo")
PORT = 29600
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure a link between two hosts or processes",
        description="Measure the transfer engine, on this machine or between two.",
    )
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    link = kinds.add_parser(
        "link",
        help="throughput by message size, and latency, per transport",
        description="Measure throughput by message size, and the latency of 4 KiB messages, per "
        "transport and for gloo. By default both ends are on this host; between two hosts, start "
        "--listen on one and run the command that it prints on the other.",
    )
    ends = link.add_mutually_exclusive_group()
    ends.add_argument(
        "--listen",
        metavar="ADDRESS",
        nargs="?",
        const="0.0.0.0",
        help="run the receiving end, on this address (default: all)",
    )
    ends.add_argument("--connect", metavar="HOST", help="run the sending end, which prints results")
    link.add_argument(
        "--port", type=whole_number_type(1, 65535), default=PORT, help="default: %(default)s"
    )
    link.add_argument(
        "--transports",
        metavar="A,B,…",
        help=f"list of {', '.join(TRANSPORTS)}; exit 1 if one is unavailable (default: all "
        "available)",
    )
    link.add_argument("--sizes", metavar="4K,1M,…", help="bytes per message (default: 4K to 64M)")
    link.add_argument(
        "--window", type=whole_number_type(1), default=4, help="messages in flight (%(default)s)"
    )
    link.add_argument(
        "--rounds", type=whole_number_type(1), default=5, help="rounds per point (%(default)s)"
    )
    link.add_argument(
        "--volume", default="128M", help="bytes per round and point (default: %(default)s)"
    )
    link.add_argument(
        "--pings", type=whole_number_type(1), default=2000, help="latency samples (%(default)s)"
    )
    link.add_argument(
        "--wait",
        type=number_type(0.001, LONGEST_SECONDS),
        default=60.0,
        help="seconds to wait for the other end (%(default)s)",
    )
    link.add_argument(
        "--output", choices=["text", "json"], default="text", help="default: %(default)s"
    )
    rails = link.add_argument_group("rdma", "For this end only.")
    add_port_arguments(rails, "rail to use", "one active port of every card")
    rails.add_argument(
        "--traffic-class", type=whole_number_type(0, 255), default=0, help="default: %(default)s"
    )
    rails.add_argument(
        "--service-level", type=whole_number_type(0, 15), default=0, help="default: %(default)s"
    )


def run(args: argparse.Namespace) -> int:
    """Run the benchmark in a trainer process: the core imports neither torch nor the engine."""
    options = validate_options(args)
    require_trainer("measurements of a link")
    command = [sys.executable, "-m", "pipemorph_trainer.bench.link", json.dumps(options)]
    return subprocess.run(command, check=False, env=os.environ).returncode


def validate_options(args: argparse.Namespace) -> dict[str, Any]:
    """The validated options. Raises :class:`InputError` that names argument and valid values."""
    for name in ("transports", "sizes", "listen", "connect"):
        if getattr(args, name) == "":
            raise InputError(f"--{name}: is empty; give it a value or leave it out")
    requested = args.transports.split(",") if args.transports else []
    for name in requested:
        if name not in TRANSPORTS:
            raise InputError(f"--transports: {name!r} is not one of {', '.join(TRANSPORTS)}")
    sizes = [_parse_bytes("--sizes", s) for s in args.sizes.split(",")] if args.sizes else SIZES
    held = args.window * max(sizes)
    if 2 * held > usable_memory_bytes():
        raise InputError(
            f"--window and --sizes: {args.window} messages of {max(sizes)} bytes, sent and "
            f"received, do not fit into this host's memory of {usable_memory_bytes()} bytes"
        )
    check_devices(args.device)
    named = bool(args.device) or args.gid_index is not None
    if named and requested and "rdma" not in requested:
        raise InputError("--device and --gid-index are for rdma, which --transports excludes")
    role = "listen" if args.listen else "connect" if args.connect else "local"
    return {
        "role": role,
        "listen": args.listen,
        "announce": False,
        "connect": args.connect,
        "port": args.port,
        # Naming a rail requests rdma.
        "required": requested or (["rdma"] if named else []),
        "transports": requested or _select_transports(role == "local", named),
        "sizes": sorted(set(sizes)),
        "window": args.window,
        "rounds": args.rounds,
        "volume": _parse_bytes("--volume", args.volume),
        "most": 2000,
        "pings": args.pings,
        "wait": args.wait,
        "output": args.output,
        "rdma": {
            "rdma_devices": args.device,
            "gid_index": -1 if args.gid_index is None else args.gid_index,
            "traffic_class": args.traffic_class,
            "service_level": args.service_level,
        },
    }


def _select_transports(local: bool, rails_named: bool) -> list[str]:
    rdma = rails_named or any(Path("/sys/class/infiniband").glob("*"))
    return ["tcp", *(["shm"] if local else []), *(["rdma"] if rdma else []), "gloo"]


def _parse_bytes(argument: str, text: str) -> int:
    """``"64M"`` → 67108864. Raises :class:`InputError`."""
    unit = UNITS.get(text[-1:].upper(), 1)
    number = text[:-1] if unit > 1 else text
    if not re.fullmatch(r"\d{1,15}", number, re.ASCII) or int(number) == 0:
        raise InputError(
            f"{argument}: {one_line(repr(text))} is not a size such as 4096, 4K or 64M"
        )
    size = int(number) * unit
    if size > 1 << 40:
        raise InputError(f"{argument}: {text!r} is more than 1024G")
    return size
