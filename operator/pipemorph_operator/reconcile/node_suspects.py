"""Records suspect nodes when an attempt ends: those at the ends of slow links."""

from __future__ import annotations

from pipemorph.api.placement import Placement
from pipemorph.api.spec import PipeMorphJob
from pipemorph.api.status import JobStatus
from pipemorph_operator import names
from pipemorph_operator.policy import node_exclusion
from pipemorph_operator.reconcile.decision import Draft


def record_suspects(draft: Draft, job: PipeMorphJob) -> None:
    """Record the nodes of links that were slow when the attempt in status ended.

    Links that recovered before do not count. May request the pods, which name the ranks' nodes;
    they are gone if their Job is.
    """
    training = JobStatus.model_validate(draft.seen.body.get("status") or {}).training
    if training is None or not training.slow_links or training.attempt != draft.status.attempt:
        return
    if draft.seen.current is None:
        return
    if draft.seen.pods is None:
        draft.out.needs_pods = True
        return
    rule = (job.spec.placement or Placement()).node_exclusion
    nodes = {pod.index: pod.node for pod in draft.seen.pods if pod.node is not None}
    found = node_exclusion.suspects(
        training.slow_links, job.spec.faults, nodes, job.spec.parallelism.stages
    )
    before = {node.name for node in draft.status.nodes if node.excluded}
    draft.status.nodes = node_exclusion.add_suspects(
        draft.status.nodes, found, training.attempt, rule, set(nodes.values())
    )
    for node in draft.status.nodes:
        if node.excluded and node.name not in before:
            draft.emit(
                "Warning",
                names.R_NODE_EXCLUDED,
                f"node {node.name} had slow links at the end of attempts"
                f" {', '.join(map(str, node.attempts))}; the next attempt avoids it",
            )
