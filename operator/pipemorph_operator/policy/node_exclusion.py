"""Nodes whose links stay sick over several attempts are avoided by the next one.

A slow link has a node at either end, so one attempt accuses two nodes. Ranks land elsewhere
in the next attempt; the node that is accused again is the one. Where they land on the same
nodes again, or there are no others, the accused are avoided as far as there is room elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from pipemorph.api.placement import NodeExclusion
from pipemorph.api.spec import Fault
from pipemorph.api.status import MAX_ATTEMPTS_KEPT, MAX_NODES_KEPT, NodeRecord, SlowLink


def ends(link: SlowLink, stages: int) -> tuple[int, int]:
    """Ranks at the two ends of a link."""
    first = link.replica * stages + link.link
    return first, first + 1


def suspects(
    slow: Iterable[SlowLink], faults: Iterable[Fault], node_of_rank: Mapping[int, str], stages: int
) -> set[str]:
    """Nodes that slow links speak against: both of a link between two nodes that are known.

    A link within a node says nothing of any network, and one that the job's own faults are
    injected into is slow because it was asked to be.
    """
    injected = {(fault.link, fault.replica) for fault in faults}
    out: set[str] = set()
    for link in slow:
        a, b = (node_of_rank.get(rank) for rank in ends(link, stages))
        if a and b and a != b and (link.link, link.replica) not in injected:
            out |= {a, b}
    return out


def accuse(
    records: Sequence[NodeRecord],
    accused: Iterable[str],
    attempt: int,
    rule: NodeExclusion,
    ran_on: Collection[str],
) -> list[NodeRecord]:
    """The records with an attempt's accusations taken in, and who is excluded from now on.

    An exclusion is never taken back. None is added when ``max_nodes`` are excluded, nor if the
    job would know fewer other nodes than ``ran_on``, those of the attempt: its ranks might fit
    nowhere, and wait for ever.
    """
    by_name = {record.name: record for record in records}
    for name in sorted(set(accused)):
        old = by_name.get(name, NodeRecord(name=name))
        if attempt not in old.attempts:
            attempts = [*old.attempts, attempt][-MAX_ATTEMPTS_KEPT:]
            by_name[name] = old.model_copy(update={"attempts": attempts})
    excluded = {record.name for record in by_name.values() if record.excluded}
    known = {*by_name, *ran_on}
    out = []
    for record in sorted(by_name.values(), key=lambda r: -len(r.attempts)):
        newly = (
            _guilty(record, rule)
            and not record.excluded
            and len(excluded) < rule.max_nodes
            and len(known - excluded - {record.name}) >= len(ran_on)
        )
        if newly:
            excluded.add(record.name)
        out.append(record.model_copy(update={"excluded": True}) if newly else record)
    # Bounded: those excluded stay, then those accused most.
    out.sort(key=lambda r: (not r.excluded, -len(r.attempts), r.name))
    return out[:MAX_NODES_KEPT]


def avoided(
    records: Sequence[NodeRecord], rule: NodeExclusion
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Nodes that the next attempt must not use, and those it is not to use if it fits elsewhere:
    accused as often, and not excluded for the reasons that :func:`accuse` has."""
    if not rule.enabled:
        return (), ()
    return (
        tuple(record.name for record in records if record.excluded),
        tuple(r.name for r in records if not r.excluded and _guilty(r, rule)),
    )


def _guilty(record: NodeRecord, rule: NodeExclusion) -> bool:
    return rule.enabled and len(record.attempts) >= rule.after_attempts
