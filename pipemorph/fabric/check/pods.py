"""The check between the pods of a job, before their ranks start.

The pods know the address of the first one alone. So it listens, the others come and say who they
are, and it leads the check of those that came.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from pipemorph.errors import InputError, PipeMorphError
from pipemorph.fabric.check.end import Host
from pipemorph.fabric.check.job_view import pod_name
from pipemorph.fabric.check.measure import Checked, check
from pipemorph.fabric.check.members import Member, member_of
from pipemorph.fabric.check.rendezvous import (
    HANDSHAKE_SECONDS,
    PORT,
    RETRY_SECONDS,
    Listener,
    RendezvousError,
    connect,
)
from pipemorph.fabric.check.verdict import NO_PORT, Finding, Port

GATHER_SECONDS = 300.0
"""Longest wait for the other pods, whose images may be pulled still."""
MOST_MEETINGS = 16
"""A pod meets so many others at most, over all its rails together: about a minute."""


class NoCheck(PipeMorphError):
    """The check could not be made."""


@dataclass(frozen=True)
class Place:
    """Which pod of a job this is. ``leader``: address of the first one."""

    index: int
    count: int
    leader: str
    secret: str


def check_pods(
    place: Place,
    *,
    seconds: float = GATHER_SECONDS,
    port: int = PORT,
    make_host: Callable[[], Host] = Host,
) -> Checked | None:
    """Take part in the job's check. Returns the result in the first pod, None in others. Raises
    :class:`NoCheck`."""
    try:
        with closing(make_host()) as own:
            if place.index == 0:
                return _lead(place, own, seconds, port)
            _take_part(place, own, seconds, port)
            return None
    except (InputError, RendezvousError) as error:
        raise NoCheck(str(error)) from None


def _lead(place: Place, own: Host, seconds: float, port: int) -> Checked:
    try:
        listener = Listener("", port, place.secret)
    except OSError as error:
        raise NoCheck(f"port {port} cannot be listened on: {error.strerror}") from None
    deadline = time.monotonic() + seconds
    with listener, ExitStack() as stack:
        members = {0: Member(pod_name(0), own.ask, tuple(own.rails()))}
        while len(members) < place.count:
            channel = listener.accept(deadline)
            if channel is None:
                break
            try:
                index = int(channel.hear(HANDSHAKE_SECONDS)["pod"])
                # A pod that lost its connection comes again.
                members[index] = member_of(pod_name(index), channel, stack)
            except (RendezvousError, InputError, KeyError, TypeError, ValueError):
                channel.close()
        rails = max(1, *(len(member.rails) for member in members.values()))
        ordered = [members[index] for index in sorted(members)]
        found = check(ordered, max(2, MOST_MEETINGS // rails))
    missing = [
        Finding("absent", Port(pod_name(n), NO_PORT), None, f"did not come within {seconds:g} s")
        for n in range(place.count)
        if n not in members
    ]
    return replace(found, findings=[*found.findings, *missing])


def _take_part(place: Place, own: Host, seconds: float, port: int) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            left = max(0.0, deadline - time.monotonic())
            channel = connect(place.leader, port, place.secret, left)
            break
        except RendezvousError as error:
            # Also if the first pod has too many at its door.
            if time.monotonic() + RETRY_SECONDS > deadline:
                raise RendezvousError(f"the first pod, {place.leader}: {error}") from None
            time.sleep(RETRY_SECONDS)
    try:
        channel.say({"pod": place.index})
        if not own.serve(channel):
            raise RendezvousError("the first pod has left the check")
    finally:
        channel.close()
