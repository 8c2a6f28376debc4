"""Excludes nodes whose links were slow in several attempts from the next attempt.

A slow link has two ends, so one attempt makes two nodes suspect. The next attempt may place ranks
elsewhere; a node that is suspect again is likely the cause. If ranks land on the same nodes again,
or there are no other nodes, suspect nodes are only avoided while other nodes have room.
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
    """Nodes at both ends of the slow links, where both are known.

    Ignores links within a node, which use no network, and links into which the job itself injects
    faults.
    """
    injected = {(fault.link, fault.replica) for fault in faults}
    out: set[str] = set()
    for link in slow:
        a, b = (node_of_rank.get(rank) for rank in ends(link, stages))
        if a and b and a != b and (link.link, link.replica) not in injected:
            out |= {a, b}
    return out


def add_suspects(
    records: Sequence[NodeRecord],
    found: Iterable[str],
    attempt: int,
    rule: NodeExclusion,
    ran_on: Collection[str],
) -> list[NodeRecord]:
    """The records after adding an attempt's suspect nodes and excluding repeated suspects.

    Exclusions are permanent. No node is excluded beyond ``max_nodes``, nor if that would leave
    fewer known nodes than ``ran_on``, the nodes of the attempt: its ranks might wait forever.
    """
    by_name = {record.name: record for record in records}
    for name in sorted(set(found)):
        old = by_name.get(name, NodeRecord(name=name))
        if attempt not in old.attempts:
            attempts = [*old.attempts, attempt][-MAX_ATTEMPTS_KEPT:]
            by_name[name] = old.model_copy(update={"attempts": attempts})
    excluded = {record.name for record in by_name.values() if record.excluded}
    known = {*by_name, *ran_on}
    out = []
    for record in sorted(by_name.values(), key=lambda r: -len(r.attempts)):
        newly = (
            _is_repeated(record, rule)
            and not record.excluded
            and len(excluded) < rule.max_nodes
            and len(known - excluded - {record.name}) >= len(ran_on)
        )
        if newly:
            excluded.add(record.name)
        out.append(record.model_copy(update={"excluded": True}) if newly else record)
    # Bounded: keep excluded nodes first, then those suspected most often.
    out.sort(key=lambda r: (not r.excluded, -len(r.attempts), r.name))
    return out[:MAX_NODES_KEPT]


def avoided(
    records: Sequence[NodeRecord], rule: NodeExclusion
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Nodes that the next attempt must not use, and nodes it should avoid: suspect as often, but
    not excluded because of the limits in :func:`add_suspects`."""
    if not rule.enabled:
        return (), ()
    return (
        tuple(record.name for record in records if record.excluded),
        tuple(r.name for r in records if not r.excluded and _is_repeated(r, rule)),
    )


def _is_repeated(record: NodeRecord, rule: NodeExclusion) -> bool:
    return rule.enabled and len(record.attempts) >= rule.after_attempts
