"""The result of a check, for people and for programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from pipemorph.fabric.check.measure import Checked
from pipemorph.fabric.check.verdict import Measured, Port, rate_text, time_text


def _round_trips(each: Measured) -> str:
    if each.p50 is None or each.p99 is None:
        return "-"
    return f"{time_text(each.p50)} / {time_text(each.p99)}"


QUANTITIES: tuple[tuple[str, Callable[[Measured], str]], ...] = (
    ("rate", lambda each: "-" if each.rate is None else rate_text(each.rate)),
    ("round trip p50 / p99", _round_trips),
    ("path MTU", lambda each: str(each.path_mtu or "nothing arrives")),
    ("sent again", lambda each: "-" if each.resent is None else str(each.resent)),
)
"""What is shown of a measurement, and how."""


def cells(result: Checked) -> Mapping[Port, Mapping[str, Measured]]:
    """The measurements by port and by the host at the other end."""
    out: dict[Port, dict[str, Measured]] = {}
    for each in sorted(result.measured, key=lambda m: m.source):
        out.setdefault(each.source, {})[each.target.host] = each
    return out


def headline(result: Checked) -> str:
    """``3 hosts, 12 directions between RDMA ports: 1 is sick``"""
    sick = {(f.source, f.target) for f in result.findings}
    much = f"{len(sick)} {'is' if len(sick) == 1 else 'are'} sick" if sick else "all are well"
    if not result.measured and not sick:
        much = "nothing was measured"
    return (
        f"{len(result.rails)} hosts, {len(result.measured)} directions between RDMA ports: {much}"
    )


def lines(result: Checked) -> list[str]:
    """The findings."""
    return [finding.line for finding in result.findings]


def record(result: Checked) -> dict[str, Any]:
    """For JSON: times in seconds, rates in bytes a second, null for what is unknown."""
    return {
        "ok": not result.findings,
        "hosts": {host: [asdict(rail) for rail in rails] for host, rails in result.rails.items()},
        "measured": [asdict(each) | _ends(each.source, each.target) for each in result.measured],
        "findings": [
            {"kind": f.kind, "text": f.text} | _ends(f.source, f.target) for f in result.findings
        ],
    }


def _ends(source: Port, target: Port | None) -> dict[str, Any]:
    return {"source": source._asdict(), "target": target and target._asdict()}
