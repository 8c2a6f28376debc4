"""Nodes at the ends of slow links: accused during an attempt, suspect after it.

An accused node is at an end of a link that is slow now. A suspect node was at an end of a link
that was slow when an attempt ended; :mod:`~pipemorph_operator.policy.node_exclusion` excludes nodes
that were suspect several times.
"""

from __future__ import annotations

from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.sections.placement import PlacementSpec
from pipemorph.spec.status_links import SlowLink
from pipemorph_operator import names
from pipemorph_operator.policy import node_exclusion
from pipemorph_operator.reconcile.decision import DecisionDraft


def note_slow_link_nodes(draft: DecisionDraft, job: PipeMorphJob) -> None:
    """Note the nodes of currently slow links in status, and accuse them. May request the pods,
    which name the nodes.

    Must run during the attempt: its pods may be gone when the operator sees its end.
    """
    slow = _read_slow_links(draft)
    _note_new_links(draft, job, slow)
    noted = draft.status.attempt_nodes
    if noted is not None:
        found = node_exclusion.find_suspects(noted, slow, job.spec.faults)
        draft.decision.accused_nodes = {node: _describe_delay(link) for node, link in found.items()}


def _note_new_links(draft: DecisionDraft, job: PipeMorphJob, slow: list[SlowLink]) -> None:
    noted = draft.status.attempt_nodes
    known = {(at.link, at.replica) for at in noted.links if len(at.nodes) == 2} if noted else set()
    if all((link.link, link.replica) in known for link in slow):
        return
    if draft.observed.pods is None:
        draft.decision.needs_pods = True
        return
    parallelism = job.spec.parallelism
    nodes = {
        rank: pod.node
        for pod in draft.observed.pods
        if pod.node is not None
        for rank in draft.layout.find_ranks_in_pod(pod.index, parallelism.ranks_per_pod)
    }
    missing = [link for link in slow if (link.link, link.replica) not in known]
    draft.status.attempt_nodes = node_exclusion.add_slow_link_nodes(
        noted, missing, nodes, draft.status.nodes, parallelism.mesh
    )


def record_suspects(draft: DecisionDraft, job: PipeMorphJob) -> None:
    """Record the nodes of links that were slow when the attempt in status ended.

    Links that recovered earlier do not count.
    """
    slow, noted = _read_slow_links(draft), draft.status.attempt_nodes
    if not slow or noted is None:
        return
    rule = (job.spec.placement or PlacementSpec()).node_exclusion
    found = node_exclusion.find_suspects(noted, slow, job.spec.faults)
    before = {node.name for node in draft.status.nodes if node.excluded}
    draft.status.nodes = node_exclusion.add_suspects(
        draft.status.nodes, found, draft.status.attempt or 0, rule, noted
    )
    for node in draft.status.nodes:
        if node.excluded and node.name not in before:
            draft.emit_event(
                "Warning",
                names.R_NODE_EXCLUDED,
                f"node {node.name} had slow links at the end of attempts"
                f" {', '.join(map(str, node.attempts))}; the next attempt avoids it",
            )


def _describe_delay(link: SlowLink) -> str:
    return (
        f"{link.name or f'link {link.link}'} {link.direction}"
        f" takes {link.delay_ms:.3g} ms more than normal"
    )


def _read_slow_links(draft: DecisionDraft) -> list[SlowLink]:
    """Slow links of the attempt in status, from the last summary of its ranks' reports."""
    training = draft.observed_status.training
    if training is None or training.attempt != draft.status.attempt:
        return []
    return training.slow_links
