"""``pipemorph fabric check``: measures what carries between the RDMA ports of hosts."""

from __future__ import annotations

import argparse
import json
import platform
import re
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipemorph.commands.emit import emit
from pipemorph.commands.table import table
from pipemorph.errors import InputError, one_line

if TYPE_CHECKING:
    from pipemorph.fabric.check.end import Host
    from pipemorph.fabric.check.measure import Checked

DEVICE = r"[A-Za-z0-9_.-]{1,63}(:\d{1,2})?"
HOST = r"\[?(?P<name>[A-Za-z0-9_.-]{1,253}|[0-9A-Fa-f:.]{2,45}(?=\]))\]?(:(?P<port>\d{1,5}))?"
LEAST_SECRET = 16
FORMATS = {"": "text", ".txt": "text", ".json": "json", ".html": "html", ".htm": "html"}
MOST_COLUMNS = 12
"""Hosts up to which the matrix is shown as text."""


def add_parser(subparsers: Any) -> None:
    from pipemorph.fabric.check.rendezvous import PORT

    parser = subparsers.add_parser(
        "fabric",
        help="check the network between hosts",
        description="Check the network between hosts.",
    )
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    check = kinds.add_parser(
        "check",
        help="probe every pair of hosts over every RDMA port, and tell what is sick",
        description="Make reliable connections between the RDMA ports of all hosts and measure "
        "what arrives, path MTU, round trips, rate, and packets that were sent again. Start "
        "--listen on all hosts but one, and --hosts there. Exit status: 0 all is well, 1 something "
        "is sick, 2 the check could not be made.",
    )
    role = check.add_mutually_exclusive_group(required=True)
    role.add_argument(
        "--listen",
        metavar="ADDRESS",
        nargs="?",
        const="",
        help="take part in one check, which another host leads (default address: all)",
    )
    role.add_argument(
        "--hosts",
        metavar="A,B,…",
        help="lead the check of this host and those, as HOST or HOST:PORT",
    )
    check.add_argument(
        "--secret-file",
        metavar="FILE",
        required=True,
        help="a secret that all hosts share; its owner alone may read it",
    )
    check.add_argument("--port", type=int, default=PORT, help="default: %(default)s")
    check.add_argument(
        "--wait",
        type=float,
        help="seconds to wait for the other hosts (default: 600 with --listen, 60 with --hosts)",
    )
    check.add_argument(
        "--device",
        metavar="DEVICE[:PORT]",
        action="append",
        default=[],
        help="RDMA device of this host to check; repeatable (default: all)",
    )
    check.add_argument(
        "--gid-index",
        type=int,
        metavar="N",
        help="index in this host's GID tables (default: a routable RoCE v2 entry)",
    )
    check.add_argument(
        "--output",
        choices=["text", "json", "html"],
        help="format (default: by the extension of FILE, else text); html is one file",
    )
    check.add_argument("--out", metavar="FILE", help="write to FILE, not to stdout")


def run(args: argparse.Namespace) -> int:
    # Imported late: other subcommands do not need it.
    from pipemorph.fabric.check.end import Host
    from pipemorph.fabric.check.report import lines

    _validate(args)
    secret = _secret(args.secret_file)
    hosts = None if args.hosts is None else [_host(text, args) for text in args.hosts.split(",")]
    with closing(Host(args.device, args.gid_index)) as own:
        if hosts is None:
            return _listen(args, own, secret)
        result = _lead(args, own, secret, hosts)
    output = args.output or FORMATS.get(Path(args.out or "").suffix.lower(), "text")
    emit(_rendered(result, output).encode(), args.out)
    if args.out is not None:
        for line in lines(result):
            print(line)
    return int(bool(result.findings))


def _validate(args: argparse.Namespace) -> None:
    for name in ("hosts", "secret_file", "out"):
        if getattr(args, name) == "":
            raise InputError(f"--{name.replace('_', '-')} is empty; give it a value")
    if not 0 < args.port < 65536:
        raise InputError(f"--port: {args.port} is not between 1 and 65535")
    if args.wait is None:
        args.wait = 60.0 if args.listen is None else 600.0
    if not 0 < args.wait < float("inf"):
        raise InputError(f"--wait: {args.wait} is not a number of seconds above 0")
    for device in args.device:
        if not re.fullmatch(DEVICE, device):
            raise InputError(f"--device: {device!r} is not a device such as mlx5_0 or mlx5_0:2")
    if args.gid_index is not None and not 0 <= args.gid_index <= 255:
        raise InputError(f"--gid-index: {args.gid_index} is not between 0 and 255")


def _secret(name: str) -> str:
    from pipemorph.credentials import existing_secret

    secret = existing_secret(Path(name), "--secret-file")
    if len(secret) < LEAST_SECRET:
        raise InputError(
            f"--secret-file {one_line(name)} has {len(secret)} characters; expected "
            f"{LEAST_SECRET} or more, as of `openssl rand -hex 32`"
        )
    return secret


def _host(text: str, args: argparse.Namespace) -> tuple[str, int]:
    found = re.fullmatch(HOST, text)
    port = int(found["port"] or args.port) if found else 0
    if found is None or not 0 < port < 65536:
        raise InputError(f"--hosts: {one_line(repr(text))} is not a HOST or HOST:PORT")
    return found["name"], port


def _listen(args: argparse.Namespace, own: Host, secret: str) -> int:
    from pipemorph.fabric.check.rendezvous import Listener

    try:
        listener = Listener(args.listen, args.port, secret)
    except OSError as error:
        where = f"port {args.port} of {args.listen or 'this host'}"
        raise InputError(f"{where} cannot be listened on: {error.strerror}") from None
    with listener:
        names = ", ".join(rail.name for rail in own.rails()) or "no RDMA port"
        print(
            f"{names}; listening on port {args.port} for\n"
            f"  pipemorph fabric check --hosts {platform.node()}:{args.port} --secret-file FILE",
            flush=True,
        )
        if not listener.serve(own.serve, args.wait):
            raise InputError(f"no check came to its end within {args.wait:g} s (--wait)")
    return 0


def _lead(
    args: argparse.Namespace, own: Host, secret: str, hosts: list[tuple[str, int]]
) -> Checked:
    from pipemorph.fabric.check.measure import check
    from pipemorph.fabric.check.members import Member, joined

    with ExitStack() as stack:
        members = [Member(platform.node(), own.ask, tuple(own.rails()))]
        members += joined(hosts, secret, args.wait, stack)
        names = [member.name for member in members]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InputError(f"--hosts: {', '.join(twice)} is there twice (this host takes part)")
        if not any(rail.active for member in members for rail in member.rails):
            raise InputError("no host has an active RDMA port; see pipemorph doctor on each")
        return check(members)


def _rendered(result: Checked, output: str) -> str:
    from pipemorph.fabric.check.report import record

    if output == "json":
        return json.dumps(record(result), indent=1) + "\n"
    if output == "html":
        from pipemorph.pictures.matrix import render_matrix

        return render_matrix(result)
    return "\n\n".join(_tables(result)) + "\n"


def _tables(result: Checked) -> list[str]:
    """Findings, then a table of each quantity with a row per port and a column per host."""
    from pipemorph.fabric.check.report import QUANTITIES, cells, headline, lines

    out = ["\n  ".join([headline(result), *lines(result)])]
    hosts = list(result.rails)
    if len(hosts) > MOST_COLUMNS:
        return [*out, f"{len(hosts)} hosts: use --out FILE.html or FILE.json for the matrix"]
    for name, text in QUANTITIES:
        rows = [
            [str(port), *(text(row[host]) if host in row else "" for host in hosts)]
            for port, row in cells(result).items()
        ]
        if rows:
            out.append(table([f"{name}, from ↓ to →", *hosts], rows, numbers=1))
    return out
