"""``pipemorph watch JOB``: the live page of a job of a cluster, on this machine."""

from __future__ import annotations

import argparse
import signal
import webbrowser
from types import FrameType
from typing import Any

from pipemorph.arguments import port
from pipemorph.commands.cluster import kubectl, reach
from pipemorph.errors import InputError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "watch",
        help="show the live page of a job of a cluster on this machine",
        description="Forward the live page of a job, which the pod of rank 0 serves, to 127.0.0.1"
        " until it is interrupted. It needs the rights to get the job, its pods and the Secret of"
        " the page, and to create pods/portforward. Exit status: 0, or 2 for invalid input or a"
        " page that cannot be had.",
    )
    parser.add_argument("job", metavar="JOB", help="[NAMESPACE/]NAME of the job")
    kubectl.add_arguments(parser)
    parser.add_argument(
        "--port", type=port, default=0, help="port of 127.0.0.1 (default: any that is free)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


class _Stopped(KeyboardInterrupt):
    """A signal asked this command to end."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped


def run(args: argparse.Namespace) -> int:
    page = reach.find_pod(args.job, args.namespace, args.context)
    token = reach.read_token(page, args.context)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        with reach.Forward(page, token, args.context, args.port) as forward:
            status, _ = forward.first()
            if status not in (200, 429):
                raise InputError(reach.why(page, status))
            print(f"watch: {forward.url}", flush=True)
            if page.host_network:
                print(
                    f"watch: pod {page.pod} is on its node's network: port {page.port} of the"
                    " node's loopback device is the page's, behind the token",
                    flush=True,
                )
            if args.open:
                webbrowser.open(forward.url)
            forward.wait()
    except _Stopped:
        return 0
    raise InputError(f"{page.job}: the connection to pod {page.pod} has ended, as the page has")
