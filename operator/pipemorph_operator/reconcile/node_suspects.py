"""Nodes at the ends of slow links: accused while they are slow, suspect when an attempt ends."""

from __future__ import annotations

from pipemorph.api.sections.placement import Placement
from pipemorph.api.spec import PipeMorphJob
from pipemorph.api.status_links import SlowLink
from pipemorph_operator import names
from pipemorph_operator.policy import node_exclusion
from pipemorph_operator.reconcile.decision import Draft


def note_nodes(draft: Draft, job: PipeMorphJob) -> None:
    """Note in status the nodes of links that are slow now, and accuse them. May request the pods,
    which name them.

    While the attempt runs, because its pods may be gone when the operator sees its end.
    """
    slow = _slow_links(draft)
    _note_new_links(draft, job, slow)
    noted = draft.status.attempt_nodes
    if noted is not None:
        found = node_exclusion.suspects(noted, slow, job.spec.faults)
        draft.out.accused = {node: _measured(link) for node, link in found.items()}


def _note_new_links(draft: Draft, job: PipeMorphJob, slow: list[SlowLink]) -> None:
    noted = draft.status.attempt_nodes
    known = {(at.link, at.replica) for at in noted.links if len(at.nodes) == 2} if noted else set()
    if all((link.link, link.replica) in known for link in slow):
        return
    if draft.seen.pods is None:
        draft.out.needs_pods = True
        return
    cut = job.spec.parallelism
    nodes = {
        rank: pod.node
        for pod in draft.seen.pods
        if pod.node is not None
        for rank in draft.layout.ranks_in(pod.index, cut.ranks_per_pod)
    }
    missing = [link for link in slow if (link.link, link.replica) not in known]
    draft.status.attempt_nodes = node_exclusion.note_nodes(
        noted, missing, nodes, draft.status.nodes, job.spec.parallelism.mesh
    )


def record_suspects(draft: Draft, job: PipeMorphJob) -> None:
    """Record the nodes of links that were slow when the attempt in status ended.

    Links that recovered before do not count.
    """
    slow, noted = _slow_links(draft), draft.status.attempt_nodes
    if not slow or noted is None:
        return
    rule = (job.spec.placement or Placement()).node_exclusion
    found = node_exclusion.suspects(noted, slow, job.spec.faults)
    before = {node.name for node in draft.status.nodes if node.excluded}
    draft.status.nodes = node_exclusion.add_suspects(
        draft.status.nodes, found, draft.status.attempt or 0, rule, noted
    )
    for node in draft.status.nodes:
        if node.excluded and node.name not in before:
            draft.emit(
                "Warning",
                names.R_NODE_EXCLUDED,
                f"node {node.name} had slow links at the end of attempts"
                f" {', '.join(map(str, node.attempts))}; the next attempt avoids it",
            )


def _measured(link: SlowLink) -> str:
    return (
        f"{link.name or f'link {link.link}'} {link.direction}"
        f" takes {link.delay_ms:.3g} ms more than normal"
    )


def _slow_links(draft: Draft) -> list[SlowLink]:
    """Slow links of the attempt in status, by the last summary of its ranks' reports."""
    training = draft.seen_status.training
    if training is None or training.attempt != draft.status.attempt:
        return []
    return training.slow_links
