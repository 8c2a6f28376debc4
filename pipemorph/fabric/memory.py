"""Remembers, over jobs, between which nodes links were slow and between which they were healthy.

One record per job and pair of ends, with the times of the newest sightings: links of one job
between the same ends are one piece of evidence, however often they are seen. Evidence loses half of
its weight every :data:`HALF_LIFE` seconds. A pair that was healthy for :data:`RECOVERED_SECONDS`
after it was slow, in whatever job, has recovered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

HALF_LIFE = 2 * 3600.0
RECOVERED_SECONDS = 600.0
FORGOTTEN = 1 / 64
"""Weight below which a sighting is dropped: after 12 hours."""
MOST_SIGHTINGS = 50_000
MOST_WEIGHT = 3.0
"""Most weight of one pair, which any number of jobs may use."""
MOST_DUMPED = 4_000
"""Most sightings in :meth:`FabricMemory.dump`: about 200 kB of JSON."""
MOST_NAMED = 400_000
"""Most characters of names in it: a ConfigMap holds 1 MiB, and a node's name up to 253."""
NEVER = float("-inf")


class End(NamedTuple):
    """One end of a link: a node, and the port on it if the link is known to use that one only."""

    node: str
    port: str = ""


class PairEvidence(NamedTuple):
    """How much evidence there is that links between two ends are slow, and that they are healthy:
    sightings by different jobs, weighted by age."""

    ends: tuple[End, End]
    slow: float
    healthy: float


Key = tuple[str, End, End]
"""Job and ends, in order."""


@dataclass(slots=True)
class _Sighting:
    """Times of the newest sightings, and since when the pair has been healthy."""

    slow_at: float = NEVER
    seen_at: float = NEVER
    well_since: float | None = None

    @property
    def well_from(self) -> float:
        """What was slow until then has recovered: the pair was healthy for long enough after it."""
        if self.well_since is None or self.seen_at - self.well_since < RECOVERED_SECONDS:
            return NEVER
        return self.seen_at - RECOVERED_SECONDS


class FabricMemory:
    """The memory. Bounded: beyond ``most`` records those not seen for longest are dropped."""

    def __init__(self, most: int = MOST_SIGHTINGS) -> None:
        self._most = most
        self._seen: dict[Key, _Sighting] = {}

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def any_slow(self) -> bool:
        """Whether any pair was slow as far as the memory goes."""
        return any(seen.slow_at > NEVER for seen in self._seen.values())

    @property
    def sick_nodes(self) -> set[str]:
        """Nodes at the ends of pairs that were slow as far as the memory goes."""
        slow = (key for key, seen in self._seen.items() if seen.slow_at > NEVER)
        return {end.node for (_, a, b) in slow for end in (a, b)}

    def merge(self, other: FabricMemory) -> None:
        """Take in what another one remembers, of the same links or of others."""
        for key, theirs in other._seen.items():
            mine = self._seen.get(key)
            self._seen[key] = replace(theirs) if mine is None else _merged(mine, theirs)
        # In the order in which they were last seen.
        newest = sorted(self._seen.items(), key=lambda item: item[1].seen_at)[-self._most :]
        self._seen = dict(newest)

    def observe(
        self, job: str, a: End, b: End, *, slow: bool, now: float, proven: bool = False
    ) -> None:
        """Take in how a link of ``job`` is between two ends. Ignores links within a node, which use
        no network. ``now``: seconds since the Unix epoch; what was seen before the newest sighting
        counts as that. ``proven``: the ends were measured for it, so that what was slow earlier has
        recovered if it is healthy."""
        if a.node == b.node:
            return
        key = (job, min(a, b), max(a, b))
        if (known := self._seen.get(key)) is not None and now < known.seen_at:
            if slow and now > known.slow_at:
                known.slow_at = now
                if known.well_since is not None and known.well_since <= now:
                    known.well_since = known.seen_at
            return
        # Moved to the end: the records are in the order in which they were last seen.
        seen = self._seen.pop(key, None) or _Sighting()
        self._seen[key] = seen
        seen.seen_at = now
        if slow:
            seen.slow_at, seen.well_since = now, None
        elif proven:
            seen.well_since = now - 2 * RECOVERED_SECONDS
        elif seen.well_since is None:
            seen.well_since = now
        while len(self._seen) > self._most:
            del self._seen[next(iter(self._seen))]

    def forget_old(self, now: float) -> None:
        """Drop records whose weight is negligible."""
        old = [k for k, s in self._seen.items() if _weight(now - s.seen_at) < FORGOTTEN]
        for key in old:
            del self._seen[key]

    def evidence(self, now: float) -> list[PairEvidence]:
        """The evidence about every pair of ends."""
        by_pair: dict[tuple[End, End], list[_Sighting]] = defaultdict(list)
        for (_, a, b), seen in self._seen.items():
            by_pair[a, b].append(seen)
        return [_weigh(ends, found, now) for ends, found in by_pair.items()]

    # --- persistence ----------------------------------------------------------------------

    def dump(self, now: float, also: Collection[str] = ()) -> dict[str, Any]:
        """JSON of the records that a restart must not lose: those of nodes with slow links, newest
        first, and of the nodes ``also``. Times in whole seconds."""
        sick = self.sick_nodes.union(also)
        names: dict[str, int] = {}
        named = 0
        rows: list[list[Any]] = []
        for (job, a, b), seen in reversed(self._seen.items()):
            if a.node in sick or b.node in sick:
                named += sum(len(each) for each in {job, *a, *b} - names.keys())
                if len(rows) >= MOST_DUMPED or named > MOST_NAMED:
                    break
                numbers = [names.setdefault(each, len(names)) for each in (job, *a, *b)]
                times = (seen.slow_at, seen.seen_at, seen.well_since)
                rows.append([*numbers, *(_age(at, now) for at in times)])
        return {"at": round(now), "names": list(names), "sightings": rows}

    @staticmethod
    def restore(dumped: Mapping[str, Any], most: int = MOST_SIGHTINGS) -> FabricMemory:
        """Inverse of :meth:`dump`. Raises ValueError for anything else."""
        memory = FabricMemory(most)
        try:
            at, names = float(dumped["at"]), [str(name) for name in dumped["names"]]
            for row in reversed(dumped["sightings"]):
                job, *ends = (names[number] for number in row[:5])
                slow, seen, well = (None if age is None else at - float(age) for age in row[5:8])
                if seen is None:
                    raise ValueError("a sighting has no time")
                memory._seen[job, End(*ends[:2]), End(*ends[2:])] = _Sighting(
                    NEVER if slow is None else slow, seen, well
                )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"not a dump of a fabric's memory: {error!r}") from error
        return memory


def _merged(one: _Sighting, other: _Sighting) -> _Sighting:
    older, newer = sorted((one, other), key=lambda seen: seen.seen_at)
    slow_at, well_since = max(one.slow_at, other.slow_at), newer.well_since
    if well_since is not None and older.well_since is not None and older.well_since >= slow_at:
        # Its job has moved: the newer one has not seen since when it is healthy.
        well_since = min(well_since, older.well_since)
    return _Sighting(slow_at, newer.seen_at, well_since)


def _weigh(ends: tuple[End, End], found: Sequence[_Sighting], now: float) -> PairEvidence:
    slow = healthy = 0.0
    well_from = max(seen.well_from for seen in found)
    for seen in found:
        if seen.slow_at == NEVER:
            healthy += _weight(now - seen.seen_at)
        elif seen.slow_at > well_from:
            slow += _weight(now - seen.slow_at)
        elif seen.well_since is not None:
            healthy += _weight(now - seen.seen_at)
    return PairEvidence(ends, min(slow, MOST_WEIGHT), min(healthy, MOST_WEIGHT))


def _weight(age: float) -> float:
    return float(2.0 ** -(max(0.0, age) / HALF_LIFE))


def _age(at: float | None, now: float) -> int | None:
    return None if at is None or at == NEVER else round(now - at)
