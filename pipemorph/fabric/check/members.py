"""The hosts of a check, as the one that leads it sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from pipemorph.errors import InputError
from pipemorph.fabric.check.probe import ProbeFailed
from pipemorph.fabric.check.rendezvous import (
    HANDSHAKE_SECONDS,
    Channel,
    RendezvousError,
    connect,
)
from pipemorph.fabric.check.verdict import Rail

ANSWER_SECONDS = 180.0
"""Longest wait for another host's answer: more than its probe may take."""
MOST_AT_ONCE = 64

Ask = Callable[[dict[str, Any]], dict[str, Any]]
"""Carries out a request. Raises :class:`ProbeFailed`."""


@dataclass(frozen=True)
class Member:
    """A host of the check."""

    name: str
    ask: Ask
    rails: tuple[Rail, ...]

    def do(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have a request carried out. Raises :class:`ProbeFailed` that names the host."""
        try:
            return self.ask(request)
        except ProbeFailed as error:
            raise ProbeFailed(f"{self.name}: {error}") from None


def joined(
    hosts: Sequence[tuple[str, int]], secret: str, seconds: float, stack: ExitStack
) -> list[Member]:
    """Connect to the hosts that listen, name and port each. ``stack``: ends the connections, and
    with that the other ends' part.

    Raises :class:`InputError` that names a host which did not come within ``seconds``.
    """

    def join(host: tuple[str, int]) -> Member:
        name, port = host
        try:
            channel = connect(name, port, secret, seconds)
        except RendezvousError as error:
            raise InputError(f"{name}: {error}") from None
        return member_of(name, channel, stack)

    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        return list(pool.map(join, hosts))


def member_of(name: str, channel: Channel, stack: ExitStack) -> Member:
    """The host at the other end of a channel. Raises :class:`InputError` that names it."""
    stack.callback(_end, channel)
    ask = _asked_over(channel)
    try:
        rails = ask({"op": "describe"})["rails"]
        return Member(name, ask, tuple(Rail.of(rail) for rail in rails))
    except (ProbeFailed, KeyError, TypeError) as error:
        raise InputError(f"{name}: {error}") from None


def _end(channel: Channel) -> None:
    # A host that is gone needs not be told.
    with suppress(RendezvousError):
        channel.ask({"op": "end"}, HANDSHAKE_SECONDS)
    channel.close()


def _asked_over(channel: Channel) -> Ask:
    def ask(request: dict[str, Any]) -> dict[str, Any]:
        try:
            said = channel.ask(request, ANSWER_SECONDS)
        except RendezvousError as error:
            raise ProbeFailed(f"the host is gone: {error}") from None
        if "error" in said:
            raise ProbeFailed(str(said["error"]))
        return said

    return ask
