"""What was measured between two rails, and what of it is sick. Pure.

Rates and round trips are compared with the median of the other measurements between ports of the
same rate, so that nothing has to be known of the hardware.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple, TypeVar

N = TypeVar("N", int, float)

SLOW = 0.5
"""Fraction of the others' median rate below which a direction is slow."""
LATE = 3.0
LATE_SECONDS = 20e-6
"""A median round trip of more than three times the others' median, and this much more, is late."""
NO_PORT = "-"
"""Name of a port that stands for its host."""
LOSSY = 3
"""Packets sent again from which a direction is lossy: one or two may be chance."""


@dataclass(frozen=True)
class Rail:
    """One RDMA port of a host. ``active``: whether it can be used; ``gid``, ``gid_index``: its
    address, None without one; ``mtu``: active MTU, bytes, None if unknown; ``rate``: as sysfs has
    it."""

    device: str
    port: int
    state: str
    active: bool
    rate: str | None = None
    gid: str | None = None
    gid_index: int | None = None
    mtu: int | None = None

    @property
    def name(self) -> str:
        return f"{self.device}/{self.port}"

    @staticmethod
    def of(record: dict[str, Any]) -> Rail:
        """Inverse of ``asdict``. Raises TypeError for anything else."""
        return Rail(**record)


class Port(NamedTuple):
    """One end of a measurement."""

    host: str
    rail: str

    def __str__(self) -> str:
        return f"{self.host} {self.rail}"


@dataclass(frozen=True)
class Measured:
    """One direction between two ports. ``mtu``: the smaller active MTU of both, bytes;
    ``path_mtu``: the largest one that arrived, None if nothing did; ``p50``, ``p99``: round trips,
    seconds; ``rate``: bytes a second; ``resent``: packets sent again; ``rates``: what the ports are
    made for, as sysfs has it; ``trouble``: why it could not be measured to the end."""

    source: Port
    target: Port
    rates: tuple[str | None, str | None] = (None, None)
    mtu: int | None = None
    path_mtu: int | None = None
    p50: float | None = None
    p99: float | None = None
    rate: float | None = None
    resent: int | None = None
    trouble: str | None = None


@dataclass(frozen=True)
class Finding:
    """Something sick. ``kind``: down, unreachable, mtu, slow, late or lossy; ``target`` is None if
    it is about one port."""

    kind: str
    source: Port
    target: Port | None
    text: str

    @property
    def line(self) -> str:
        ends = f"{self.source} → {self.target}" if self.target else str(self.source)
        return f"{ends}: {self.text}"


def judge(rails: Mapping[str, Sequence[Rail]], measured: Sequence[Measured]) -> list[Finding]:
    """What is sick. ``rails``: of each host."""
    return [*_ports(rails), *(found for each in measured for found in _direction(each, measured))]


def suspects(measured: Sequence[Measured]) -> list[Measured]:
    """Those that are slow, late or lossy, which may be chance."""
    by_chance = {"slow", "late", "lossy"}
    return [each for each in measured if by_chance & {f.kind for f in _direction(each, measured)}]


def better(first: Measured, again: Measured) -> Measured:
    """Two measurements as one: a passing burst of other traffic leaves one of them alone."""
    if first.trouble is not None or again.trouble is not None:
        return first if first.trouble is not None else again
    return replace(
        first,
        p50=_least(first.p50, again.p50),
        p99=_least(first.p99, again.p99),
        resent=_least(first.resent, again.resent),
        rate=max(first.rate or 0.0, again.rate or 0.0),
    )


def _least(a: N | None, b: N | None) -> N | None:
    return None if a is None or b is None else min(a, b)


def _ports(rails: Mapping[str, Sequence[Rail]]) -> Iterable[Finding]:
    """Ports that most hosts with a port of that name can use, and this host cannot; and ports with
    a smaller MTU than most of that name have."""
    every: dict[str, dict[str, Rail]] = {}
    for host, found in rails.items():
        if not any(rail.active for rail in found):
            yield Finding("down", Port(host, NO_PORT), None, "has no active RDMA port")
        for rail in found:
            every.setdefault(rail.name, {})[host] = rail
    for name, hosts in every.items():
        usable = [rail for rail in hosts.values() if rail.active]
        usual = Counter(rail.mtu for rail in usable if rail.mtu is not None)
        most = max(usual, key=lambda mtu: (usual[mtu], mtu), default=None)
        for host, rail in hosts.items():
            port = Port(host, name)
            if not rail.active and 2 * len(usable) >= len(hosts):
                why = f"is {rail.state}" if rail.state != "ACTIVE" else "has no usable GID"
                yield Finding("down", port, None, f"{why}; it is in use on {len(usable)} hosts")
            elif rail.active and rail.mtu is not None and most is not None and rail.mtu < most:
                yield Finding(
                    "mtu", port, None, f"has MTU {rail.mtu}; on other hosts this port has {most}"
                )


def _direction(each: Measured, measured: Sequence[Measured]) -> Iterable[Finding]:
    def found(kind: str, text: str) -> Finding:
        return Finding(kind, each.source, each.target, text)

    if each.path_mtu is None:
        yield found("unreachable", each.trouble or "nothing arrives")
        return
    if each.mtu is not None and each.path_mtu < each.mtu:
        yield found(
            "mtu",
            f"packets of more than {each.path_mtu} bytes do not arrive, and both ports have MTU "
            f"{each.mtu} or more",
        )
        return
    if each.trouble is not None:
        yield found("lossy", each.trouble)
        return
    others = [m for m in measured if m is not each and m.rates == each.rates]
    if each.rate is not None and (rates := [m.rate for m in others if m.rate is not None]):
        usual = median(rates)
        if each.rate < SLOW * usual:
            yield found("slow", f"carries {rate_text(each.rate)}; others carry {rate_text(usual)}")
    if each.p50 is not None and (times := [m.p50 for m in others if m.p50 is not None]):
        usual = median(times)
        if each.p50 > LATE * usual and each.p50 > usual + LATE_SECONDS:
            yield found(
                "late",
                f"round trips take {time_text(each.p50)}; those of others {time_text(usual)}",
            )
    if each.resent is not None and each.resent >= LOSSY:
        yield found("lossy", f"{each.resent} packets were sent again")


def rate_text(rate: float) -> str:
    """``12.3 Gb/s``, from bytes a second."""
    gbps = rate * 8e-9
    return f"{gbps:.3g} Gb/s" if gbps >= 0.1 else f"{gbps * 1e3:.3g} Mb/s"


def time_text(seconds: float) -> str:
    """``4.2 µs``"""
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
