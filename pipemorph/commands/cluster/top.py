"""``pipemorph top``: the jobs of a cluster, or one of them, as they are now."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from pipemorph.commands.cluster import kubectl
from pipemorph.commands.emit import emit
from pipemorph.errors import InputError, one_line
from pipemorph.explain.cluster_job import ClusterJob, read_job
from pipemorph.top.browser import Browser
from pipemorph.top.job import job_page
from pipemorph.top.jobs import jobs_table, ordered
from pipemorph.top.page import Line, bars_for, fact, line, plain
from pipemorph.top.seen import Seen

LEAST_EVERY, EVERY = 1.0, 5.0


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "top",
        help="watch the jobs of a cluster: which links are slow, what was done, what it saved",
        description="Watch the PipeMorphJobs of a cluster, or one of them. kubectl reads them."
        " Keys: up and down, enter opens a job, b goes back, s sorts, r reverses, q quits. Without"
        " a terminal, or on a dumb one, print once. Exit status: 0, or 2 for"
        " invalid input.",
    )
    parser.add_argument(
        "job", metavar="JOB", nargs="?", help="[NAMESPACE/]NAME of one job (default: all jobs)"
    )
    kubectl.add_arguments(parser)
    parser.add_argument(
        "-A", "--all-namespaces", action="store_true", help="jobs of all namespaces"
    )
    parser.add_argument("--once", action="store_true", help="print once, as plain text")
    parser.add_argument(
        "--every",
        metavar="SECONDS",
        type=float,
        default=EVERY,
        help=f"how often to ask the cluster, at least {LEAST_EVERY:g} (default: {EVERY:g})",
    )


def run(args: argparse.Namespace) -> int:
    if not LEAST_EVERY <= args.every <= 3600:
        raise InputError(f"--every: is {args.every:g}; expected {LEAST_EVERY:g} to 3600 seconds")
    if args.all_namespaces and (args.job or args.namespace):
        raise InputError("--all-namespaces: does not go with a job or --namespace; give one")
    what, arguments = _target(args)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if args.once or not terminal or os.environ.get("TERM", "dumb") == "dumb":
        _once(args, kubectl.Query(what, arguments, args.context).answer())
        return 0
    if importlib.util.find_spec("rich") is None:
        raise InputError(
            "a live view needs rich: pip install 'pipemorph[top]'; --once prints without it"
        )
    from pipemorph.top.screen import show

    poll = _Poll(what, arguments, args)
    try:
        show(poll.browser, poll)
    finally:
        poll.close()
    return 0


def _target(args: argparse.Namespace) -> tuple[str, list[str]]:
    """What is asked for, in words and for kubectl."""
    if args.job is None:
        if args.all_namespaces:
            return "all namespaces", ["--all-namespaces"]
        if args.namespace:
            return f"namespace {args.namespace}", ["--namespace", args.namespace]
        return "current namespace", []
    arguments = kubectl.job_arguments(args.job, args.namespace)
    if arguments is None:
        raise InputError(f"{one_line(args.job)}: is no name of a job; expected [NAMESPACE/]NAME")
    return args.job, arguments


def jobs_of(content: dict[str, Any], *, only: bool) -> tuple[list[ClusterJob], list[str]]:
    """The jobs of an object or list, and what is wrong with those that cannot be read. ``only``:
    raise :class:`InputError` for it."""
    jobs, notes = [], []
    for each in content.get("items", [content]):
        try:
            jobs.append(read_job(each))
        except InputError as error:
            metadata = each.get("metadata", {})
            note = f"{metadata.get('namespace')}/{metadata.get('name')}: {error}"
            if only:
                raise InputError(note) from None
            notes.append(note)
    return jobs, notes


def _once(args: argparse.Namespace, content: dict[str, Any]) -> None:
    jobs, notes = jobs_of(content, only=args.job is not None)
    width = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else None
    lines: list[Line] = []
    if args.job is not None:
        lines += [each for job in jobs for each in job_page(job, Seen(), time.time(), width=width)]
    elif jobs:
        found = ordered(jobs, "name")
        lines += jobs_table(found, {}, width=width, namespaced=args.all_namespaces)
    elif not notes:
        lines.append(line("no PipeMorphJob was found"))
    lines += [each for note in notes for each in fact("!", note, width)]
    emit(plain(lines).encode(), None)


class _Poll:
    """Asks the cluster again and again, without waiting for it but the first time.

    Raises :class:`InputError` if that fails; later the last answer stays, with a note.
    """

    def __init__(self, what: str, arguments: list[str], args: argparse.Namespace) -> None:
        self._ask: Callable[[], kubectl.Query] = lambda: kubectl.Query(
            what, arguments, args.context
        )
        self._every = args.every
        self.browser = Browser(
            what,
            only=args.job is not None,
            namespaced=args.all_namespaces,
            bars=bars_for(sys.stdout),
        )
        self._query: kubectl.Query | None = None
        self._begun, self._answered = time.monotonic(), time.time()
        self._take(self._ask())

    def __call__(self) -> None:
        try:
            if self._query is None:
                if time.monotonic() - self._begun >= self._every:
                    self._begun = time.monotonic()
                    self._query = self._ask()
            elif self._query.ended():
                query, self._query = self._query, None
                self._take(query)
        except InputError as error:
            ago = time.strftime("%H:%M:%S", time.gmtime(self._answered))
            self.browser.notes = [f"{error}; what is shown is of {ago} UTC"]

    def _take(self, query: kubectl.Query) -> None:
        content = query.answer()
        self._answered = time.time()
        self.browser.take(*jobs_of(content, only=self.browser.only))

    def close(self) -> None:
        """End the query in progress."""
        if self._query is not None:
            self._query.close()
