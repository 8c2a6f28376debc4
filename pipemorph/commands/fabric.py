"""``pipemorph fabric check``: measures the connections between the RDMA ports of hosts."""

from __future__ import annotations

import argparse
import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from pipemorph.argument_types import add_port_arguments, check_devices
from pipemorph.commands.output_file import add_output_arguments, choose_output_format, write_output
from pipemorph.errors import InputError, one_line

if TYPE_CHECKING:
    from pipemorph.fabric.hosts import FabricHost
    from pipemorph.fabric.measurement import CheckResult

HOST = r"[A-Za-z0-9_][A-Za-z0-9_.@:/%-]{0,252}"
"""Pattern of a host; the remote shell cannot take it for an option."""
SHELL = "ssh -o BatchMode=yes {host}"
COLUMNS = ("from", "to", "reachable", "path MTU", "round trip p50", "p99", "rate")
FORMATS = ("text", "json")


def add_parser(subparsers: Any) -> None:
    text = "check the network between hosts"
    parser = subparsers.add_parser("fabric", help=text, description=f"{text.capitalize()}.")
    actions = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    check = actions.add_parser(
        "check",
        help="measure every pair of hosts over every RDMA port",
        description="Make reliable connections between the RDMA ports of all hosts and measure "
        "what arrives, path MTU, round trip and rate. Exit status: 0 all ports reach each other "
        "with their MTU, 1 some do not, 2 the check could not be made.",
    )
    role = check.add_mutually_exclusive_group(required=True)
    role.add_argument(
        "--hosts",
        metavar="A,B,…",
        help="the hosts to check: localhost for this one, a remote shell reaches the others",
    )
    role.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    check.add_argument(
        "--shell",
        metavar="COMMAND",
        default=SHELL,
        help="the remote shell (default: '%(default)s'; for pods 'kubectl exec -i {host} --')",
    )
    add_port_arguments(check, "RDMA device to check, on all hosts", "all")
    add_output_arguments(check, FORMATS, "text")


def run(args: argparse.Namespace) -> int:
    # Imported late: other subcommands do not need it.
    from pipemorph.fabric.hosts import LocalFabricHost, serve_requests
    from pipemorph.terminal import make_table, render_parts

    _validate_arguments(args)
    if args.serve:
        return serve_requests(partial(LocalFabricHost, args.device, args.gid_index))
    output = choose_output_format(args, FORMATS, "text")
    result = _check_hosts(args)
    text = json.dumps(result_to_json(result), indent=1) + "\n"
    if output == "text":
        measured = make_table(COLUMNS, build_measurement_rows(result), right=COLUMNS[3:])
        text = render_parts("\n  ".join(summarize_result(result)), "", measured, out=args.out)
    write_output(text.encode(), args.out)
    if args.out is not None:
        write_output(render_parts(*summarize_result(result)).encode(), None)
    return int(bool(find_problems(result)))


def _validate_arguments(args: argparse.Namespace) -> None:
    if "{host}" not in args.shell:
        raise InputError(f"--shell: {one_line(args.shell)!r} has no {{host}}")
    check_devices(args.device)


def _check_hosts(args: argparse.Namespace) -> CheckResult:
    from pipemorph.fabric.measurement import MAX_CONCURRENT, measure_fabric

    names = args.hosts.split(",")
    for name in names:
        if not re.fullmatch(HOST, name):
            raise InputError(f"--hosts: {one_line(repr(name))} is not a host")
        if names.count(name) > 1:
            raise InputError(f"--hosts: {name} is there twice")
    if len(names) < 2:
        raise InputError("--hosts: expected two or more; localhost is this one")
    with ExitStack() as stack, ThreadPoolExecutor(MAX_CONCURRENT) as pool:
        hosts = list(pool.map(lambda name: _open_fabric_host(name, args, stack), names))
        if not any(rail.active for host in hosts for rail in host.rails):
            raise InputError("no host has an active RDMA port; see pipemorph doctor on each")
        return measure_fabric(hosts)


def _open_fabric_host(name: str, args: argparse.Namespace, stack: ExitStack) -> FabricHost:
    from pipemorph.fabric.hosts import LOCALHOST, LocalFabricHost, connect_host, open_remote

    if name == LOCALHOST:
        local = LocalFabricHost(args.device, args.gid_index)
        stack.callback(local.close)
        return connect_host(name, local.execute_request)
    command = ["pipemorph", "fabric", "check", "--serve"]
    command += [f"--device={device}" for device in args.device]
    if args.gid_index is not None:
        command.append(f"--gid-index={args.gid_index}")
    return open_remote(name, args.shell, command, stack)


def find_problems(result: CheckResult) -> list[str]:
    """Hosts without a port, and directions in which nothing or no packet of full MTU arrives."""
    return [
        *(
            f"{host}: no active RDMA port"
            for host, rails in result.rails.items()
            if not any(rail.active for rail in rails)
        ),
        *(
            f"{' '.join(each.source)} → {' '.join(each.target)}: {each.problem}"
            for each in result.measured
            if each.problem
        ),
    ]


def summarize_result(result: CheckResult) -> list[str]:
    """A line of numbers, then the problems."""
    found = find_problems(result)
    numbers = f"{len(result.rails)} hosts, {len(result.measured)} directions between RDMA ports"
    return [f"{numbers}; problems: {len(found)}", *found]


def build_measurement_rows(result: CheckResult) -> list[list[str]]:
    """The cells of :data:`COLUMNS` for each direction."""
    return [
        [
            " ".join(each.source),
            " ".join(each.target),
            "no" if each.path_mtu is None else "yes",
            str(each.path_mtu or "-"),
            _format_duration(each.p50),
            _format_duration(each.p99),
            "-" if each.rate is None else f"{each.rate * 8e-9:.3g} Gb/s",
        ]
        for each in sorted(result.measured, key=lambda each: (each.source, each.target))
    ]


def result_to_json(result: CheckResult) -> dict[str, Any]:
    """JSON fields: times in seconds, rates in bytes a second, null for unknown values."""
    return {
        "ok": not find_problems(result),
        "problems": find_problems(result),
        "hosts": {host: [asdict(rail) for rail in rails] for host, rails in result.rails.items()},
        "measured": [
            asdict(each)
            | {"source": each.source._asdict(), "target": each.target._asdict()}
            | {"reachable": each.path_mtu is not None, "problem": each.problem}
            for each in result.measured
        ],
    }


def _format_duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
