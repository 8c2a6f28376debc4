"""Nodes whose links stay sick over several attempts are avoided by the next one.

A slow link has a node at either end, so one attempt accuses two nodes. Ranks land elsewhere
in the next attempt; the node that is accused again is the one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pipemorph.spec_cluster import NodeExclusion
from pipemorph.status import MAX_ATTEMPTS_KEPT, MAX_NODES_KEPT, NodeRecord, SlowLink


def ends(link: SlowLink, stages: int) -> tuple[int, int]:
    """Ranks at the two ends of a link."""
    first = link.replica * stages + link.link
    return first, first + 1


def accuse(
    records: Sequence[NodeRecord],
    accused: Iterable[str],
    attempt: int,
    rule: NodeExclusion,
) -> list[NodeRecord]:
    """The records with an attempt's accusations taken in, and who is excluded from now on.

    An exclusion is never taken back; with ``max_nodes`` excluded, none is added.
    """
    by_name = {record.name: record for record in records}
    for name in sorted(set(accused)):
        old = by_name.get(name, NodeRecord(name=name))
        if attempt not in old.attempts:
            attempts = [*old.attempts, attempt][-MAX_ATTEMPTS_KEPT:]
            by_name[name] = old.model_copy(update={"attempts": attempts})
    excluded = sum(record.excluded for record in by_name.values())
    out = []
    for record in by_name.values():
        guilty = rule.enabled and len(record.attempts) >= rule.after_attempts
        newly = guilty and not record.excluded and excluded < rule.max_nodes
        excluded += newly
        out.append(record.model_copy(update={"excluded": True}) if newly else record)
    # Bounded: those excluded stay, then those accused most.
    out.sort(key=lambda r: (not r.excluded, -len(r.attempts), r.name))
    return out[:MAX_NODES_KEPT]


def nodes_of(ranks: Iterable[int], node_of_rank: Mapping[int, str | None]) -> set[str]:
    """Nodes of some ranks, where known."""
    return {node for rank in ranks if (node := node_of_rank.get(rank))}
