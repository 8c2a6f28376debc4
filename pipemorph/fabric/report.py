"""The result of a check as rows of a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pipemorph.fabric.measurement import CheckResult

HEAD = ("from", "to", "reachable", "path MTU", "round trip p50", "p99", "rate")


def problems(result: CheckResult) -> list[str]:
    """Hosts without a port, and directions that carry nothing or no packets of their ports' MTU."""
    return [
        *(
            f"{host}: no active RDMA port"
            for host, rails in result.rails.items()
            if not any(rail.active for rail in rails)
        ),
        *(
            f"{' '.join(each.source)} → {' '.join(each.target)}: {each.problem}"
            for each in result.measured
            if each.problem
        ),
    ]


def summary(result: CheckResult) -> list[str]:
    """A line of numbers, then the problems."""
    found = problems(result)
    numbers = f"{len(result.rails)} hosts, {len(result.measured)} directions between RDMA ports"
    return [f"{numbers}; problems: {len(found)}", *found]


def rows(result: CheckResult) -> list[list[str]]:
    """The cells of :data:`HEAD` for each direction."""
    return [
        [
            " ".join(each.source),
            " ".join(each.target),
            "no" if each.path_mtu is None else "yes",
            str(each.path_mtu or "-"),
            _time(each.p50),
            _time(each.p99),
            "-" if each.rate is None else f"{each.rate * 8e-9:.3g} Gb/s",
        ]
        for each in sorted(result.measured, key=lambda each: (each.source, each.target))
    ]


def as_record(result: CheckResult) -> dict[str, Any]:
    """For JSON: times in seconds, rates in bytes a second, null for what is unknown."""
    return {
        "ok": not problems(result),
        "problems": problems(result),
        "hosts": {host: [asdict(rail) for rail in rails] for host, rails in result.rails.items()},
        "measured": [
            asdict(each)
            | {"source": each.source._asdict(), "target": each.target._asdict()}
            | {"reachable": each.path_mtu is not None, "problem": each.problem}
            for each in result.measured
        ],
    }


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
