"""The result of a check, for people and for programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from pipemorph.fabric.check.measure import Checked
from pipemorph.fabric.check.verdict import Measured, Port, rate_text, time_text
from pipemorph.fabric.findings import ACCUSED
from pipemorph.fabric.memory import End, PairEvidence
from pipemorph.fabric.triangulation import Suspect, suspects

WEIGHT = 2.0
"""Of a pair as evidence, where 1 is that of one job: what looks sick is measured again, alone."""


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


def accused(result: Checked) -> list[Suspect]:
    """The hosts and ports that explain what is sick between several of them."""
    sick = {(finding.source, finding.target) for finding in result.findings}
    pairs: dict[tuple[End, End], bool] = {}
    for each in result.measured:
        first, second = sorted(End(port.host, port.rail) for port in (each.source, each.target))
        was = pairs.get((first, second), False)
        pairs[first, second] = was or (each.source, each.target) in sick
    evidence = [
        PairEvidence(ends, slow=WEIGHT * is_sick, healthy=WEIGHT * (not is_sick))
        for ends, is_sick in pairs.items()
    ]
    return [each for each in suspects(evidence, {}) if each.confidence >= ACCUSED]


def lines(result: Checked) -> list[str]:
    """What is accused, then the findings."""
    return [
        *(
            f"{each.part.kind} {each.part.name}: {each.slow} of {each.pairs} pairs of ports with it"
            f" are sick (confidence {each.confidence:.2f})"
            for each in accused(result)
        ),
        *(finding.line for finding in result.findings),
    ]


def record(result: Checked) -> dict[str, Any]:
    """For JSON: times in seconds, rates in bytes a second, null for what is unknown."""
    return {
        "ok": not result.findings,
        "hosts": {host: [asdict(rail) for rail in rails] for host, rails in result.rails.items()},
        "measured": [asdict(each) | _ends(each.source, each.target) for each in result.measured],
        "accused": [
            {"kind": each.part.kind, "name": each.part.name, "confidence": each.confidence}
            for each in accused(result)
        ],
        "findings": [
            {"kind": f.kind, "text": f.text} | _ends(f.source, f.target) for f in result.findings
        ],
    }


def _ends(source: Port, target: Port | None) -> dict[str, Any]:
    return {"source": source._asdict(), "target": target and target._asdict()}
