"""What is told about sick parts of the network: from when a part is accused until it is well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipemorph.fabric.triangulation import Kind, Part, Suspect

ACCUSED = 0.9
"""Confidence from which a part is accused."""
SUSPECTED = 0.5
"""Confidence below which an accused part counts as well again, and from which it is avoided where
that costs nothing."""
MOST_TOLD = 64
MOST_PORTS = 16
MOST_TEXT = 300


@dataclass(frozen=True)
class Finding:
    """A suspect part of the network. ``since``: when it was first listed, seconds since the Unix
    epoch; ``ports``: of a node, those that report errors themselves, at most :data:`MOST_PORTS`."""

    kind: str
    name: str
    confidence: float
    accused: bool
    slow: int
    pairs: int
    since: float
    ports: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """``node a: links to 3 of 4 other ends were slow (confidence 0.99)``"""
        ports = f"; its ports {', '.join(self.ports)} report errors" if self.ports else ""
        return (
            f"{self.kind} {self.name}: {self.slow} of {self.pairs} pairs of ends with links through"
            f" it were slow{ports} (confidence {self.confidence:.2f})"
        )[:MOST_TEXT]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"ports": list(self.ports)}

    @staticmethod
    def of(record: Mapping[str, Any]) -> Finding:
        """Inverse of :meth:`record`. Raises ValueError for anything else."""
        try:
            return Finding(
                kind=Kind(record["kind"]).value,
                name=str(record["name"]),
                confidence=float(record["confidence"]),
                accused=bool(record["accused"]),
                slow=int(record["slow"]),
                pairs=int(record["pairs"]),
                since=float(record["since"]),
                ports=tuple(str(port) for port in record.get("ports") or ()),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a finding about the fabric: {error!r}") from error


class Findings:
    """The findings in force. ``told``: those of an earlier process."""

    def __init__(self, told: Iterable[Finding] = ()) -> None:
        self._told = {Part(Kind(each.kind), each.name): each for each in told}

    @property
    def all(self) -> list[Finding]:
        """Accused parts first, then by confidence."""
        return sorted(self._told.values(), key=lambda f: (not f.accused, -f.confidence, f.name))

    def update(
        self, suspects: Iterable[Suspect], ports: Mapping[str, Iterable[str]], now: float
    ) -> tuple[list[Finding], list[Finding]]:
        """Take in what was found now. Returns the findings that are newly accused, and those that
        were and are well again. ``ports``: of each node, those that report errors themselves."""
        before, self._told = self._told, {}
        for suspect in suspects:
            old = before.get(suspect.part)
            if suspect.confidence < SUSPECTED or len(self._told) >= MOST_TOLD:
                continue
            self._told[suspect.part] = Finding(
                kind=suspect.part.kind.value,
                name=suspect.part.name,
                confidence=round(suspect.confidence, 3),
                accused=suspect.confidence >= ACCUSED or (old is not None and old.accused),
                slow=suspect.slow,
                pairs=suspect.pairs,
                since=old.since if old is not None else now,
                ports=tuple(sorted(ports.get(suspect.part.name, ()))[:MOST_PORTS]),
            )
        was = {part for part, told in before.items() if told.accused}
        now_accused = {part for part, told in self._told.items() if told.accused}
        accused = [self._told[part] for part in sorted(now_accused - was)]
        return accused, [before[part] for part in sorted(was - now_accused)]


def nodes(findings: Iterable[Finding], *, accused: bool) -> dict[str, Finding]:
    """The nodes that are accused, or those that are at least suspected; a node stands for its
    ports."""
    out: dict[str, Finding] = {}
    for each in findings:
        if (each.accused or not accused) and each.kind in (Kind.NODE, Kind.PORT):
            out.setdefault(each.name.partition("/")[0], each)
    return out
