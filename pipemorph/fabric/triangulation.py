"""Which nodes, ports and switches explain the slow links of all jobs. Pure.

The model. A part of the network is *sick* or not: a node, one of its ports, the switch of a rack,
or the uplinks of a rack. A link is slow with probability :data:`FALSE_ALARM` by itself, and each
sick part on its way makes it slow with probability :data:`SHOWS`. So slow links that share an end
whose other ends have healthy links accuse that end; slow links between racks, whose nodes have
healthy links within them, accuse the racks' uplinks; and one slow link accuses both of its ends
equally, with little confidence.

The rule. Parts are taken as sick one after the other, the most probable one first, as long as one
is more probable than that none is needed. The confidence in a part is its posterior probability
against every other single part, and against none, with the other parts that were taken as sick.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from math import exp, log
from typing import NamedTuple

from pipemorph.fabric.memory import End, PairEvidence

FALSE_ALARM = 0.01
SHOWS = 0.6
"""Less than 1: a sick part may have a well half, such as one of two ports or uplinks."""
HEALTHY_GAIN = log(1 - SHOWS)
"""What a sick part adds to the logarithm of the probability that a link is healthy."""
MOST_RATIO = 200.0
"""Largest logarithm of a likelihood ratio that is told apart from larger ones."""
MOST_SICK = 16
"""Most parts that are taken as sick together."""
LEAST_CONFIDENCE = 0.02
"""Parts with less are not listed."""


class Kind(StrEnum):
    """What a part of the network is. SWITCH: that of a rack; UPLINK: what connects it to others."""

    NODE = "node"
    PORT = "port"
    SWITCH = "switch"
    UPLINK = "uplink"


PRIOR = {Kind.NODE: 1e-3, Kind.PORT: 1e-3, Kind.SWITCH: 1e-4, Kind.UPLINK: 1e-4}
"""Probability that a part is sick, before any evidence."""


class Part(NamedTuple):
    """``name``: the node, ``node/port``, or the rack; several racks that cannot be told apart are
    joined by ``+``."""

    kind: Kind
    name: str


@dataclass(frozen=True)
class Suspect:
    """A part that may be sick. ``confidence``: the probability that it is; ``slow``: pairs of ends
    with slow links through it; ``pairs``: all pairs through it with evidence."""

    part: Part
    confidence: float
    slow: int
    pairs: int


def suspects(evidence: Iterable[PairEvidence], racks: Mapping[str, str]) -> list[Suspect]:
    """The parts that may be sick, most probable first. ``racks``: rack of each node, where
    known."""
    found = list(evidence)
    involved = {part for pair in found if pair.slow > 0 for part in _parts(pair.ends, racks)}
    pairs: list[PairEvidence] = []
    through: dict[Part, list[int]] = defaultdict(list)
    for pair in found:
        parts = _parts(pair.ends, racks) & involved
        for part in parts:
            through[part].append(len(pairs))
        if parts:
            pairs.append(pair)
    inference = _Inference(pairs, through)
    sick = inference.explanation()
    listed = [
        Suspect(part, confidence, sum(pairs[n].slow > 0 for n in where), len(where))
        for part, where in inference.through.items()
        if (confidence := inference.confidence(part, sick)) >= LEAST_CONFIDENCE
    ]
    return sorted(listed, key=lambda each: (-each.confidence, each.part))


def _parts(ends: tuple[End, End], racks: Mapping[str, str]) -> set[Part]:
    """The parts on the way of a link."""
    out = {Part(Kind.NODE, end.node) for end in ends}
    out |= {Part(Kind.PORT, f"{end.node}/{end.port}") for end in ends if end.port}
    places = {racks[end.node] for end in ends if end.node in racks}
    out |= {Part(Kind.SWITCH, rack) for rack in places}
    if len(places) > 1:
        out |= {Part(Kind.UPLINK, rack) for rack in places}
    return out


class _Inference:
    """``through``: indices of the pairs through each part. Switches and uplinks through which the
    same pairs go cannot be told apart and are one part."""

    def __init__(self, pairs: Sequence[PairEvidence], through: Mapping[Part, list[int]]) -> None:
        self._pairs = pairs
        self.through: dict[Part, list[int]] = {}
        self._prior: dict[Part, float] = {}
        self._known: dict[frozenset[Part], Mapping[Part, float]] = {}
        alike: dict[tuple[int, ...], list[Part]] = defaultdict(list)
        for part, where in through.items():
            if part.kind in (Kind.SWITCH, Kind.UPLINK):
                alike[tuple(where)].append(part)
            else:
                self.through[part], self._prior[part] = where, PRIOR[part.kind]
        for parts in alike.values():
            kinds, names = {part.kind for part in parts}, sorted({part.name for part in parts})
            kind = Kind.SWITCH if Kind.SWITCH in kinds else Kind.UPLINK
            one = Part(kind, "+".join(names))
            self.through[one] = through[parts[0]]
            self._prior[one] = sum(PRIOR[part.kind] for part in parts)

    def explanation(self) -> list[Part]:
        """The parts that are taken as sick."""
        sick: list[Part] = []
        while len(sick) < MOST_SICK:
            odds = self._odds(sick)
            best = max(odds, key=lambda part: (odds[part], part), default=None)
            if best is None or odds[best] <= 1:
                break
            sick.append(best)
        return sick

    def confidence(self, part: Part, sick: Sequence[Part]) -> float:
        """Posterior probability that a part is sick."""
        if part in sick:
            return self._share(part, [each for each in sick if each != part])
        # It may be what another part was taken for.
        instead = [[each for each in sick if each != rival] for rival in sick]
        return max(self._share(part, others) for others in [sick, *instead])

    def _share(self, part: Part, sick: Sequence[Part]) -> float:
        odds = self._odds(sick)
        return odds[part] / (1 + sum(odds.values()))

    def _odds(self, sick: Sequence[Part]) -> Mapping[Part, float]:
        """Of each other part: that it is sick as well, against that it is not."""
        key = frozenset(sick)
        if key not in self._known:
            self._known[key] = self._computed(key)
        return self._known[key]

    def _computed(self, sick: Collection[Part]) -> Mapping[Part, float]:
        count = [0] * len(self._pairs)
        for part in sick:
            for number in self.through[part]:
                count[number] += 1
        gains = [
            pair.slow * _slow_gain(sick_parts) + pair.healthy * HEALTHY_GAIN
            for pair, sick_parts in zip(self._pairs, count, strict=True)
        ]
        return {
            part: self._prior[part] * exp(min(MOST_RATIO, sum(gains[number] for number in where)))
            for part, where in self.through.items()
            if part not in sick
        }


@cache
def _slow_gain(sick: int) -> float:
    """What one more sick part adds to the logarithm of the probability that a link with ``sick``
    of them is slow."""

    def slow(count: int) -> float:
        return 1 - (1 - FALSE_ALARM) * (1 - SHOWS) ** count

    return log(slow(sick + 1) / slow(sick))
