"""``pipemorph watch JOB``: the live page of a job of a cluster, on this machine."""

from __future__ import annotations

import argparse
import signal
import webbrowser
from types import FrameType
from typing import Any

from pipemorph.argument_types import port_type
from pipemorph.commands.cluster import kubectl, page_forward
from pipemorph.errors import InputError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "watch",
        help="show the live page of a job of a cluster on this machine",
        description="Forward the live page of a job, which the pod of rank 0 serves, to 127.0.0.1"
        " until it is interrupted. It needs the rights to get the job, its pods and the Secret of"
        " the page, and to create pods/portforward. Exit status: 0, or 2 for invalid input or a"
        " page that cannot be reached.",
    )
    parser.add_argument("job", metavar="JOB", help="[NAMESPACE/]NAME of the job")
    kubectl.add_kubectl_arguments(parser)
    parser.add_argument(
        "--port", type=port_type, default=0, help="port of 127.0.0.1 (default: any that is free)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


class _StopSignal(KeyboardInterrupt):
    """Signal that ends this command."""


def _raise_stop_signal(number: int, frame: FrameType | None) -> None:
    raise _StopSignal


def run(args: argparse.Namespace) -> int:
    page = page_forward.find_page_pod(args.job, args.namespace, args.context)
    token = page_forward.read_page_token(page, args.context)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _raise_stop_signal)
    try:
        with page_forward.PagePortForward(page, token, args.context, args.port) as forward:
            status, _ = forward.wait_for_first_document()
            if status not in (200, 429):
                raise InputError(page_forward.explain_missing_page(page, status))
            print(f"watch: {forward.url}", flush=True)
            if page.host_network:
                print(
                    f"watch: pod {page.pod} is on its node's network: port {page.port} of the"
                    " node's loopback device serves the page to holders of its token",
                    flush=True,
                )
            if args.open:
                webbrowser.open(forward.url)
            forward.wait()
    except _StopSignal:
        return 0
    raise InputError(f"{page.job}: the connection to pod {page.pod} has ended, and so has the page")
