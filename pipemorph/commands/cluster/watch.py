"""``pipemorph watch JOB``: the live page of a job of a cluster, on this machine."""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
import webbrowser
from typing import Any

from aiohttp import web

from pipemorph.commands.cluster import kubectl
from pipemorph.commands.cluster.reach import Ingest, Reached, find
from pipemorph.errors import InputError
from pipemorph.watch import door
from pipemorph.watch.access import VIEWER

QUERY = ("column", "iteration", "after")
"""What the page asks for; anything else is not passed on."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "watch",
        help="serve the live page of a job of a cluster on this machine",
        description="Serve the live page of a job on 127.0.0.1, until it is interrupted. The page"
        " comes from the job's ingest, through the API server, with kubectl's credentials. Exit"
        " status: 0, or 2 for invalid input or a page that cannot be had.",
    )
    parser.add_argument("job", metavar="JOB", help="[NAMESPACE/]NAME of the job")
    kubectl.add_arguments(parser)
    add_arguments(parser)
    parser.add_argument(
        "--port", type=_port, default=0, help="port of 127.0.0.1 (default: any that is free)"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of all commands that ask the ingest."""
    parser.add_argument(
        "--ingest",
        metavar="NAMESPACE/SERVICE",
        help="the ingest's Service (default: the one to which the job's ranks report)",
    )
    parser.add_argument(
        "--service-account",
        metavar="NAME",
        default=VIEWER,
        help="account of the job's namespace whose tokens the ingest is shown (default:"
        " %(default)s)",
    )


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r} is no port; expected 0 to 65535")
    return int(text)


def run(args: argparse.Namespace) -> int:
    place = find(args.job, args.namespace, args.ingest, args.context)
    with door.listen(args.port, "--port") as listener:
        ingest = Ingest(place, args.service_account, args.context)
        asyncio.run(_serve(ingest, listener, open_it=args.open))
    return 0


async def _serve(ingest: Ingest, listener: socket.socket, *, open_it: bool) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with ingest:
        first = await ingest.ask({}, page=False)
        if first.status != 200:
            raise InputError(why(ingest.name, first))
        relay = Relay(ingest)
        page = door.Door(listener, relay.tell)
        await page.open()
        try:
            print(f"watch: {page.url}", flush=True)
            if open_it:
                webbrowser.open(page.url)
            await stop.wait()
        finally:
            await page.close()


def why(name: str, found: Reached) -> str:
    """Why there is no page, and what to do."""
    said = f"{name}: {found.why()}"
    if found.status == 403 and not found.of_ingest:
        return f"{said}; the chart's value watch.groups says who may reach the ingest so"
    if found.status == 403:
        return f"{said}; bind role view to that account, or name another with --service-account"
    if found.status == 404 and not found.of_ingest:
        return f"{said}; an ingest of this release is needed"
    return said


class Relay:
    """Passes on what the browser asks for. Says what goes wrong once, until it goes well again."""

    def __init__(self, ingest: Ingest) -> None:
        self._ingest = ingest
        self._said = ""

    async def tell(self, request: web.BaseRequest, page: bool) -> web.Response:
        query = {key: request.query[key] for key in QUERY if key in request.query}
        try:
            found = await self._ingest.ask(query, page=page)
        except InputError as error:
            self._say(str(error))
            return door.failed()
        if found.status == 200:
            self._said = ""
            return door.told(found.body, page=page)
        if found.status == 429:
            return door.busy()
        self._say(why(self._ingest.name, found))
        return door.failed()

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            print(f"watch: {text}", file=sys.stderr, flush=True)
