"""Measures path MTU, round trip and rate of every direction between the RDMA ports of hosts."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from pipemorph.fabric.hosts import FabricHost, FabricRail
from pipemorph.fabric.json_process import ProbeError

MAX_CONCURRENT = 64
LEAST_MTU = 256
DEFAULT_MTU = 1024
"""MTU that is tried if a port's own is unknown."""
SMALL, LARGE = 8, 64 << 10
PINGS = 1000
PING_SECONDS = 0.5
MAX_WRITES = 1 << 20
WINDOW = 32
QUEUED_SECONDS = 0.1
"""Least time that the queued writes may take on a slow rail before packets are sent again."""
STREAM_SECONDS = 0.5


class WriteFailedError(ProbeError):
    """A device gave up a write."""


class RailEndpoint(NamedTuple):
    """End of a measurement."""

    host: str
    rail: str


@dataclass(frozen=True)
class Measurement:
    """Direction between two ports. ``mtu``: the smaller active MTU of both, bytes, None if unknown;
    ``path_mtu``: the largest MTU whose packets arrived, None if there is none; ``p50``, ``p99``:
    round trips, seconds; ``rate``: bytes a second; ``error``: why the rest is missing."""

    source: RailEndpoint
    target: RailEndpoint
    mtu: int | None = None
    path_mtu: int | None = None
    p50: float | None = None
    p99: float | None = None
    rate: float | None = None
    error: str = ""

    @property
    def problem(self) -> str:
        """Problem of the direction; empty if packets of the ports' MTU arrive."""
        if self.error or self.mtu is None or self.path_mtu == self.mtu:
            return self.error
        return (
            f"packets of more than {self.path_mtu} bytes do not arrive, and both ports have MTU"
            f" {self.mtu} or more"
        )


@dataclass(frozen=True)
class CheckResult:
    """Result of a check. ``rails``: ports of each host."""

    rails: Mapping[str, Sequence[FabricRail]]
    measured: Sequence[Measurement]


@dataclass(frozen=True)
class _Direction:
    source: FabricHost
    target: FabricHost
    rails: tuple[FabricRail, FabricRail]

    @property
    def ports(self) -> tuple[RailEndpoint, RailEndpoint]:
        here, there = self.rails
        return RailEndpoint(self.source.name, here.name), RailEndpoint(self.target.name, there.name)


def measure_fabric(hosts: Sequence[FabricHost]) -> CheckResult:
    """Measure all directions, in rounds in which each host has one peer. Returns also errors."""
    measured: list[Measurement] = []
    with ThreadPoolExecutor(MAX_CONCURRENT) as pool:
        for pairs in schedule_rounds(len(hosts)):
            pairings = [_list_directions(hosts[i], hosts[j]) for i, j in pairs]
            measured += chain(
                *pool.map(lambda ways: [_measure_direction(way) for way in ways], pairings)
            )
    return CheckResult({host.name: host.rails for host in hosts}, measured)


def schedule_rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair of ``count`` once, in rounds of disjoint pairs (the circle method)."""
    circle = [*range(count), *([-1] if count % 2 else [])]
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if min(pair) >= 0]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def pair_rails(
    ours: Sequence[FabricRail], theirs: Sequence[FabricRail]
) -> list[tuple[FabricRail, FabricRail]]:
    """Pairs of ports, as the engine pairs them (``pair_rails`` of csrc/verbs/gid.cpp): the longest
    common prefix of addresses first, since ports in one subnet reach each other."""
    near = [rail for rail in ours if rail.active]
    far = [rail for rail in theirs if rail.active]
    candidates = sorted(
        (-_common_bits(a, b), i, j) for i, a in enumerate(near) for j, b in enumerate(far)
    )
    pairs: dict[int, int] = {}
    for _, i, j in candidates:
        if i not in pairs and j not in pairs.values():
            pairs[i] = j
    return [(near[i], far[j]) for i, j in sorted(pairs.items())]


def _common_bits(a: FabricRail, b: FabricRail) -> int:
    first, second = (int(ipaddress.IPv6Address(rail.gid or "::")) for rail in (a, b))
    return 128 - (first ^ second).bit_length()


def _list_directions(a: FabricHost, b: FabricHost) -> list[_Direction]:
    return [
        way
        for here, there in pair_rails(a.rails, b.rails)
        for way in (_Direction(a, b, (here, there)), _Direction(b, a, (there, here)))
    ]


def _measure_direction(way: _Direction) -> Measurement:
    source, target = way.ports
    known = [rail.mtu for rail in way.rails if rail.mtu is not None]
    most = min(known, default=DEFAULT_MTU)
    mtu, path_mtu = most if known else None, None
    try:
        path_mtu, why = _find_path_mtu(way, most)
        if path_mtu is None:
            return Measurement(source, target, mtu, error=f"nothing arrives: {why}")
        with _open_connection(way, path_mtu) as connection:
            # The first write finds caches and timers cold.
            alone = min(_measure_writes(way, connection, LARGE, 3)["each"])
            pings = _measure_writes(way, connection, SMALL, PINGS)["each"]
            window = max(1, min(WINDOW, int(QUEUED_SECONDS / alone)))
            stream = _measure_writes(
                way, connection, LARGE, MAX_WRITES, window=window, seconds=STREAM_SECONDS
            )
    except ProbeError as error:
        return Measurement(source, target, mtu, path_mtu, error=str(error))
    pings.sort()
    p50, p99 = pings[len(pings) // 2], pings[len(pings) * 99 // 100]
    rate = stream["bytes"] / stream["seconds"]
    return Measurement(source, target, mtu, path_mtu, p50, p99, rate)


def _find_path_mtu(way: _Direction, most: int) -> tuple[int | None, str]:
    """Largest MTU whose packets arrive, None if there is none, and the error of a larger one."""

    def describe_failure(mtu: int) -> str:
        """Error of packets of this size; empty if they arrive."""
        with _open_connection(way, mtu) as connection:
            try:
                _measure_writes(way, connection, mtu, 1)
            except WriteFailedError as error:
                return str(error)
        return ""

    why = describe_failure(most)
    if not why:
        return most, ""
    found = None
    mtu = LEAST_MTU
    while mtu < most and not describe_failure(mtu):
        found, mtu = mtu, 2 * mtu
    return found, why


@contextmanager
def _open_connection(way: _Direction, mtu: int) -> Iterator[int]:
    """Open a connection with a path MTU. Yields its number at the source."""
    opened: list[tuple[FabricHost, dict[str, Any]]] = []
    try:
        for host, rail in zip((way.source, way.target), way.rails, strict=True):
            request = {"device": rail.device, "port": rail.port, "gid_index": rail.gid_index}
            opened.append((host, host.send_request({"op": "open", "bytes": LARGE, **request})))
        (_, ours), (_, theirs) = opened
        way.target.send_request({"op": "join", "id": theirs["id"], "mtu": mtu, "peer": ours})
        way.source.send_request({"op": "join", "id": ours["id"], "mtu": mtu, "peer": theirs})
        yield ours["id"]
    finally:
        for host, end in opened:
            with suppress(ProbeError):  # A host that is gone has closed it.
                host.send_request({"op": "close", "id": end["id"]})


def _measure_writes(
    way: _Direction, qp: int, size: int, count: int, **limits: float
) -> dict[str, Any]:
    """Write ``size`` bytes at most ``count`` times, within other ``limits`` than the default."""
    request = {"op": "write", "id": qp, "bytes": size, "count": count}
    result = way.source.send_request(request | {"window": 1, "seconds": PING_SECONDS} | limits)
    if "failed" in result:
        raise WriteFailedError(result["failed"])
    return result
