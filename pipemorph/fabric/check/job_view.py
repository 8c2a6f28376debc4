"""The check between a job's pods as rank 0's agent and the ingest get it: bounded. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from pipemorph.fabric.check.measure import Checked
from pipemorph.fabric.check.verdict import NO_PORT, Measured, Port
from pipemorph.wire.states import (
    MOST_PAIRS,
    MOST_PORTS,
    SHOWN,
    FabricDirection,
    FabricPair,
    FabricView,
)

MOST_TEXT = 500
MOST_NAME = 64
"""Characters of a port's name that are told."""
OTHERS = 4
"""Other pods that a port which is down is told not to reach: enough to accuse the port and none of
them."""


def pod_name(index: int) -> str:
    """What a pod is called in a check."""
    return f"pod {index}"


def view_of(result: Checked, *, ranks_per_pod: int = 1, at: float = 0.0) -> FabricView:
    """The result, what is sick and the slowest directions first. The hosts are pods, by
    :func:`pod_name`. ``at``: seconds since the Unix epoch."""
    known = [each for each in result.measured if each.rate is not None]
    sick = {(f.source, f.target) for f in result.findings}
    worst = sorted(result.measured, key=lambda m: ((m.source, m.target) not in sick, m.rate or 0.0))
    ports, pairs = _pairs(result)
    return FabricView(
        pods=len(result.rails),
        directions=len(result.measured),
        sick_count=len(result.findings),
        sick=tuple(finding.line[:MOST_TEXT] for finding in result.findings[:SHOWN]),
        rate=median(m.rate for m in known if m.rate is not None) if known else None,
        round_trip=median(m.p50 for m in known if m.p50 is not None) if known else None,
        slowest=tuple(_direction(each) for each in worst[:SHOWN]),
        at=at,
        ranks_per_pod=ranks_per_pod,
        ports=ports,
        pairs=pairs,
    )


def _direction(each: Measured) -> FabricDirection:
    return FabricDirection(
        source=str(each.source)[: 2 * MOST_NAME],
        target=str(each.target)[: 2 * MOST_NAME],
        rate=each.rate,
        round_trip=each.p50,
        mtu=each.path_mtu,
        resent=each.resent,
    )


def _pairs(result: Checked) -> tuple[tuple[str, ...], tuple[FabricPair, ...]]:
    """The names of ports, and what was found between them: half of the room for what is sick, then
    those that have a pod in common with that, then those that are farthest from the median."""
    numbers: dict[str, int] = {}
    found: dict[tuple[Port, Port], FabricPair] = {}
    for ends, pair in [*_measured(result), *_unreached(result)]:
        names = [end.rail[:MOST_NAME] for end in ends]
        if len(numbers.keys() | {*names}) > MOST_PORTS:
            continue
        ports = [None if n == NO_PORT else numbers.setdefault(n, len(numbers)) for n in names]
        found[ends] = pair._replace(ports=(ports[0], ports[1]))
    involved = {pod for p in found.values() if p.sick for pod in (p.first, p.second)}
    usual = median([p.rate for p in found.values() if p.rate is not None] or [1.0])

    def rank(pair: FabricPair) -> tuple[bool, float]:
        away = abs((pair.rate or usual) / usual - 1)
        return not involved & {pair.first, pair.second}, -away

    sick = [pair for pair in found.values() if pair.sick][: MOST_PAIRS // 2]
    well = sorted((pair for pair in found.values() if not pair.sick), key=rank)
    return tuple(numbers), (*sick, *well[: MOST_PAIRS - len(sick)])


Found = Iterator[tuple[tuple[Port, Port], FabricPair]]


def _measured(result: Checked) -> Found:
    """Both directions as one, in the order of their ends."""
    ports = {finding.source for finding in result.findings if finding.target is None}
    sick = {(f.source, f.target) for f in result.findings}
    by_ends: dict[tuple[Port, Port], list[Measured]] = {}
    for each in result.measured:
        first, second = sorted((each.source, each.target), key=lambda end: (_pod(end), end.rail))
        by_ends.setdefault((first, second), []).append(each)
    for ends, both in by_ends.items():
        rates = [each.rate for each in both if each.rate]
        times = [each.p50 for each in both if each.p50 is not None]
        yield (
            ends,
            FabricPair(
                _pod(ends[0]),
                _pod(ends[1]),
                ports=(None, None),
                sick=bool(ports & {*ends}) or any((m.source, m.target) in sick for m in both),
                rate=float(f"{min(rates):.4g}") if rates else None,
                round_trip=float(f"{max(times):.4g}") if times else None,
            ),
        )


def _unreached(result: Checked) -> Found:
    """Ports that are down: nothing was measured of them, and nobody reaches them."""
    for finding in result.findings:
        if finding.kind != "down":
            continue
        down = finding.source
        for host in _after(down.host, result.rails):
            other = Port(host, down.rail)
            usable = [r for r in result.rails[host] if r.active]
            if usable and (down.rail == NO_PORT or any(r.name == down.rail for r in usable)):
                ends = (down, other) if _pod(down) < _pod(other) else (other, down)
                pods = _pod(ends[0]), _pod(ends[1])
                yield ends, FabricPair(pods[0], pods[1], ports=(None, None), sick=True)


def _after(host: str, rails: Mapping[str, object]) -> list[str]:
    """The hosts after one, in turn: not the same ones for all."""
    ordered = sorted(rails, key=_index)
    at = ordered.index(host) + 1
    return [*ordered[at:], *ordered[: at - 1]][:OTHERS]


def _pod(port: Port) -> int:
    return _index(port.host)


def _index(name: str) -> int:
    return int(name.rpartition(" ")[2])
