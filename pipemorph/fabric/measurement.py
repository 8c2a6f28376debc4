"""Measures path MTU, round trip and rate of every direction between the RDMA ports of hosts."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from pipemorph.fabric.hosts import Host, Rail
from pipemorph.fabric.json_process import ProbeError

MAX_CONCURRENT = 64
LEAST_MTU = 256
DEFAULT_MTU = 1024
"""MTU that is tried where a port's own is unknown."""
SMALL, LARGE = 8, 64 << 10
PINGS = 1000
PING_SECONDS = 0.5
MAX_WRITES = 1 << 20
WINDOW = 32
QUEUED_SECONDS = 0.1
"""Least time that the queued writes may take on a slow rail before packets are sent again."""
STREAM_SECONDS = 0.5


class WriteFailed(ProbeError):
    """The device gave up a write."""


class Port(NamedTuple):
    """One end of a measurement."""

    host: str
    rail: str


@dataclass(frozen=True)
class Measurement:
    """One direction between two ports. ``mtu``: the smaller active MTU of both, bytes, None if
    unknown; ``path_mtu``: the largest one that arrived, None if nothing did; ``p50``, ``p99``:
    round trips, seconds; ``rate``: bytes a second; ``error``: why it is incomplete."""

    source: Port
    target: Port
    mtu: int | None = None
    path_mtu: int | None = None
    p50: float | None = None
    p99: float | None = None
    rate: float | None = None
    error: str = ""

    @property
    def problem(self) -> str:
        """What is wrong with the direction; empty if it carries packets of its ports' MTU."""
        if self.error or self.mtu is None or self.path_mtu == self.mtu:
            return self.error
        return (
            f"packets of more than {self.path_mtu} bytes do not arrive, and both ports have MTU"
            f" {self.mtu} or more"
        )


@dataclass(frozen=True)
class CheckResult:
    """``rails``: of each host."""

    rails: Mapping[str, Sequence[Rail]]
    measured: Sequence[Measurement]


@dataclass(frozen=True)
class _Direction:
    source: Host
    target: Host
    rails: tuple[Rail, Rail]

    @property
    def ports(self) -> tuple[Port, Port]:
        here, there = self.rails
        return Port(self.source.name, here.name), Port(self.target.name, there.name)


def check(hosts: Sequence[Host]) -> CheckResult:
    """Measure all directions, in rounds in which each host has one peer. Raises nothing for what a
    host cannot do: that is in the result."""
    measured: list[Measurement] = []
    with ThreadPoolExecutor(MAX_CONCURRENT) as pool:
        for pairs in rounds(len(hosts)):
            meetings = [_directions(hosts[i], hosts[j]) for i, j in pairs]
            measured += chain(*pool.map(lambda ways: [_measure(way) for way in ways], meetings))
    return CheckResult({host.name: host.rails for host in hosts}, measured)


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
    pairs: dict[int, int] = {}
    for _, i, j in candidates:
        if i not in pairs and j not in pairs.values():
            pairs[i] = j
    return [(left[i], right[j]) for i, j in sorted(pairs.items())]


def _common_bits(a: Rail, b: Rail) -> int:
    first, second = (int(ipaddress.IPv6Address(rail.gid or "::")) for rail in (a, b))
    return 128 - (first ^ second).bit_length()


def _directions(a: Host, b: Host) -> list[_Direction]:
    return [
        way
        for here, there in paired(a.rails, b.rails)
        for way in (_Direction(a, b, (here, there)), _Direction(b, a, (there, here)))
    ]


def _measure(way: _Direction) -> Measurement:
    source, target = way.ports
    known = [rail.mtu for rail in way.rails if rail.mtu is not None]
    most = min(known, default=DEFAULT_MTU)
    mtu, path_mtu = most if known else None, None
    try:
        path_mtu, why = _path_mtu(way, most)
        if path_mtu is None:
            return Measurement(source, target, mtu, error=f"nothing arrives: {why}")
        with _connected(way, path_mtu) as connection:
            # The first write finds caches and timers cold.
            alone = min(_write(way, connection, LARGE, 3)["each"])
            pings = _write(way, connection, SMALL, PINGS)["each"]
            window = max(1, min(WINDOW, int(QUEUED_SECONDS / alone)))
            stream = _write(
                way, connection, LARGE, MAX_WRITES, window=window, seconds=STREAM_SECONDS
            )
    except ProbeError as error:
        return Measurement(source, target, mtu, path_mtu, error=str(error))
    pings.sort()
    p50, p99 = pings[len(pings) // 2], pings[len(pings) * 99 // 100]
    rate = stream["bytes"] / stream["seconds"]
    return Measurement(source, target, mtu, path_mtu, p50, p99, rate)


def _path_mtu(way: _Direction, most: int) -> tuple[int | None, str]:
    """The largest MTU whose packets arrive, None if none does, and why a larger one did not."""

    def failure(mtu: int) -> str:
        """Why packets of this size do not arrive; empty if they do."""
        with _connected(way, mtu) as connection:
            try:
                _write(way, connection, mtu, 1)
            except WriteFailed as error:
                return str(error)
        return ""

    why = failure(most)
    if not why:
        return most, ""
    found = None
    mtu = LEAST_MTU
    while mtu < most and not failure(mtu):
        found, mtu = mtu, 2 * mtu
    return found, why


@contextmanager
def _connected(way: _Direction, mtu: int) -> Iterator[int]:
    """A connection with a path MTU. Yields its number at the source."""
    opened: list[tuple[Host, dict[str, Any]]] = []
    try:
        for host, rail in zip((way.source, way.target), way.rails, strict=True):
            request = {"device": rail.device, "port": rail.port, "gid_index": rail.gid_index}
            opened.append((host, host.request({"op": "open", "bytes": LARGE, **request})))
        (_, ours), (_, theirs) = opened
        way.target.request({"op": "join", "id": theirs["id"], "mtu": mtu, "peer": ours})
        way.source.request({"op": "join", "id": ours["id"], "mtu": mtu, "peer": theirs})
        yield ours["id"]
    finally:
        for host, end in opened:
            with suppress(ProbeError):  # A host that is gone has closed it.
                host.request({"op": "close", "id": end["id"]})


def _write(way: _Direction, qp: int, size: int, count: int, **limits: float) -> dict[str, Any]:
    """Write ``size`` bytes at most ``count`` times; ``limits``: window and seconds, if others."""
    request = {"op": "write", "id": qp, "bytes": size, "count": count}
    result = way.source.request(request | {"window": 1, "seconds": PING_SECONDS} | limits)
    if "failed" in result:
        raise WriteFailed(result["failed"])
    return result
