"""Measures every direction between the rails of some hosts."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from pipemorph.fabric.check.members import MOST_AT_ONCE, Member
from pipemorph.fabric.check.probe import ProbeFailed
from pipemorph.fabric.check.verbs_probe import ACK_TIMEOUT
from pipemorph.fabric.check.verdict import (
    Finding,
    Measured,
    Port,
    Rail,
    better,
    judge,
    suspects,
)

LEAST_MTU = 256
DEFAULT_MTU = 1024
"""Taken where a port's own is unknown."""
SMALL = 8
PINGS = 1000
PING_SECONDS = 0.5
LARGE = 64 << 10
MOST_WRITES = 1 << 20
WINDOW = 32
QUEUED_SECONDS = 0.1
"""What waits on a slow rail takes less than this, so that its packets are not sent again."""
STREAM_SECONDS = 0.5
RESENT_SECONDS = 0.9 * 4.096e-6 * 2**ACK_TIMEOUT
"""A round trip of this time had a packet sent again."""
TIMES_AGAIN = 2


class NotArrivedError(ProbeFailed):
    """The device gave up a write."""


@dataclass(frozen=True)
class Checked:
    """The result. ``rails``: of each host."""

    rails: Mapping[str, Sequence[Rail]]
    measured: Sequence[Measured]
    findings: Sequence[Finding]


@dataclass(frozen=True)
class _Direction:
    source: Member
    target: Member
    rails: tuple[Rail, Rail]

    @property
    def ports(self) -> tuple[Port, Port]:
        ends = zip((self.source, self.target), self.rails, strict=True)
        first, second = (Port(member.name, rail.name) for member, rail in ends)
        return first, second


def check(members: Sequence[Member], most_rounds: int | None = None) -> Checked:
    """Measure all directions, in rounds in which a host has one peer; then those that look slow,
    late or lossy again, alone. Raises nothing for what a host cannot do: that is in the result.

    ``most_rounds``: each host meets at most so many others.
    """
    found: dict[tuple[Port, Port], Measured] = {}
    ways: dict[tuple[Port, Port], _Direction] = {}
    for pairs in islice(rounds(len(members)), most_rounds):
        meetings = [_directions(members[i], members[j]) for i, j in pairs]
        ways.update({way.ports: way for way in chain(*meetings)})
        with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
            done = pool.map(lambda meeting: [_measured(way) for way in meeting], meetings)
            found.update({(m.source, m.target): m for m in chain(*done)})
    for _ in range(TIMES_AGAIN):
        for each in suspects(list(found.values())):
            key = each.source, each.target
            found[key] = better(each, _measured(ways[key]))
    rails = {member.name: member.rails for member in members}
    measured = list(found.values())
    return Checked(rails, measured, judge(rails, measured))


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair of ``count`` once, in rounds in which nobody is twice (the circle method)."""
    circle = [*range(count), *([-1] if count % 2 else [])]
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if min(pair) >= 0]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def paired(ours: Sequence[Rail], theirs: Sequence[Rail]) -> list[tuple[Rail, Rail]]:
    """Which port talks to which, as the engine decides (``pair_rails`` of csrc/verbs/gid.cpp): the
    longest common prefix of addresses first, since ports in one subnet reach each other."""
    left = [rail for rail in ours if rail.active]
    right = [rail for rail in theirs if rail.active]
    candidates = sorted(
        (-_common_bits(a, b), i, j) for i, a in enumerate(left) for j, b in enumerate(right)
    )
    used: tuple[set[int], set[int]] = (set(), set())
    pairs = []
    for _, i, j in candidates:
        if i not in used[0] and j not in used[1]:
            used[0].add(i)
            used[1].add(j)
            pairs.append((i, j))
    return [(left[i], right[j]) for i, j in sorted(pairs)]


def _common_bits(a: Rail, b: Rail) -> int:
    first, second = (int(ipaddress.IPv6Address(rail.gid or "::")) for rail in (a, b))
    return 128 - (first ^ second).bit_length()


def _directions(a: Member, b: Member) -> list[_Direction]:
    return [
        way
        for here, there in paired(a.rails, b.rails)
        for way in (_Direction(a, b, (here, there)), _Direction(b, a, (there, here)))
    ]


def _measured(way: _Direction) -> Measured:
    source, target = way.ports
    rates = (way.rails[0].rate, way.rails[1].rate)
    known = [rail.mtu for rail in way.rails if rail.mtu is not None]
    most = min(known, default=DEFAULT_MTU)
    mtu: int | None = most if known else None
    told: dict[str, Any] = {"rates": rates, "mtu": mtu}
    try:
        path_mtu, why = _path_mtu(way, most)
        told["path_mtu"] = path_mtu
        if path_mtu is None:
            return Measured(source, target, trouble=f"nothing arrives: {why}", **told)
        before = _resent(way)
        with _connected(way, path_mtu) as connection:
            # The first write of each size finds caches and timers cold.
            first = [
                _write(way, connection, LARGE, 1, window=1, seconds=PING_SECONDS) for _ in range(3)
            ]
            pings = _write(way, connection, SMALL, PINGS, window=1, seconds=PING_SECONDS)["each"]
            alone = min(each["seconds"] for each in first[1:])
            window = max(1, min(WINDOW, int(QUEUED_SECONDS / alone)))
            stream = _write(
                way, connection, LARGE, MOST_WRITES, window=window, seconds=STREAM_SECONDS
            )
        after = _resent(way)
    except ProbeFailed as error:
        return Measured(source, target, trouble=str(error), **told)
    late = sum(seconds > RESENT_SECONDS for seconds in pings)
    pings.sort()
    return Measured(
        source,
        target,
        p50=pings[len(pings) // 2],
        p99=pings[len(pings) * 99 // 100],
        rate=stream["bytes"] / stream["seconds"],
        resent=late if before is None or after is None else after - before,
        **told,
    )


def _path_mtu(way: _Direction, most: int) -> tuple[int | None, str]:
    """The largest MTU whose packets arrive, None if none does, and why a larger one did not."""

    def arrives(mtu: int) -> str:
        """Why not; empty if it does."""
        with _connected(way, mtu) as connection:
            try:
                _write(way, connection, mtu, 1, window=1, seconds=PING_SECONDS)
            except NotArrivedError as error:
                return str(error)
        return ""

    why = arrives(most)
    if not why:
        return most, ""
    found = None
    mtu = LEAST_MTU
    while mtu < most and not arrives(mtu):
        found, mtu = mtu, 2 * mtu
    return found, why


@contextmanager
def _connected(way: _Direction, mtu: int) -> Iterator[int]:
    """A connection with a path MTU. Yields its number at the source."""
    opened: list[tuple[Member, dict[str, Any]]] = []
    try:
        for member, rail in zip((way.source, way.target), way.rails, strict=True):
            request = {"device": rail.device, "port": rail.port, "gid_index": rail.gid_index}
            opened.append((member, member.do({"op": "open", "bytes": LARGE, **request})))
        (_, ours), (_, theirs) = opened
        way.target.do({"op": "join", "id": theirs["id"], "mtu": mtu, "peer": ours})
        way.source.do({"op": "join", "id": ours["id"], "mtu": mtu, "peer": theirs})
        yield ours["id"]
    finally:
        for member, end in opened:
            with suppress(ProbeFailed):  # A host that is gone has closed it.
                member.do({"op": "close", "id": end["id"]})


def _write(
    way: _Direction, connection: int, size: int, count: int, *, window: int, seconds: float
) -> dict[str, Any]:
    said = way.source.do(
        {
            **{"op": "write", "id": connection, "bytes": size},
            **{"count": count, "window": window, "seconds": seconds},
        }
    )
    if "failed" in said:
        raise NotArrivedError(said["failed"])
    return said


def _resent(way: _Direction) -> int | None:
    rail = way.rails[0]
    count = way.source.do({"op": "resent", "device": rail.device, "port": rail.port})["count"]
    return None if count is None else int(count)
