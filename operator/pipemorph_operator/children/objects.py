"""All objects of one attempt: Service, NetworkPolicy, ConfigMap, Job, and a PodGroup if
gang-scheduled.

The engine's Secret is random, so the reconciler creates it once and never applies it again.
"""

from __future__ import annotations

import json

from pipemorph.api.spec import PipeMorphJob
from pipemorph.exits import EXITS_LOST
from pipemorph_operator import names
from pipemorph_operator.children import gang, pod
from pipemorph_operator.children.attempt import Attempt, Object
from pipemorph_operator.config import OperatorConfig

BACKOFFS_PER_INDEX = 2
MOST_RULES = 20
"""Of a Job's podFailurePolicy."""


def objects(attempt: Attempt, config: OperatorConfig) -> list[Object]:
    """Objects to apply, in order: those that pods need precede the Job that creates the pods.

    Raises :class:`Unbuildable`.
    """
    out = [*lasting_objects(attempt, config), config_map(attempt, config)]
    made = batch_job(attempt, config)
    if (group := gang.pod_group(attempt, made["spec"]["template"])) is not None:
        out.append(group)
    return [*out, made]


def lasting_objects(attempt: Attempt, config: OperatorConfig) -> list[Object]:
    """The objects that are the same for all attempts: they can be made again if they are gone."""
    policies = [network_policy(attempt, config)] if config.network_policies else []
    return [*policies, service(attempt)]


def service(attempt: Attempt) -> Object:
    """Headless Service: gives every rank's pod a stable DNS name, even before it is ready."""
    labels = {k: v for k, v in attempt.labels().items() if k != names.LABEL_ATTEMPT}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": attempt.metadata(attempt.service, labels),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.LABEL_JOB_UID: attempt.uid},
        },
    }


def network_policy(attempt: Attempt, config: OperatorConfig) -> Object:
    """NetworkPolicy, the same for all attempts: only ranks of the job reach each other's ports, for
    the rendezvous, collectives and the engine. Where ranks connect to is left to other policies:
    their data and checkpoints may be anywhere."""
    ranks = {"podSelector": {"matchLabels": {names.LABEL_JOB_UID: attempt.uid}}}
    ingress: list[Object] = [{"from": [ranks]}]
    spec = attempt.job.spec
    if first := spec.trainer.metrics_port:
        last = first + spec.parallelism.ranks_per_pod - 1
        scrape: Object = {"ports": [{"port": first, "endPort": last}]}
        if config.metrics_from:
            scrape["from"] = list(config.metrics_from)
        ingress.append(scrape)
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": service(attempt)["metadata"],
        "spec": {**ranks, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def job_file(job: PipeMorphJob) -> str:
    """The job's YAML for the ranks: only fields they need, so that older trainers can read it."""
    whole = job.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    for field in ("template", "placement", "suspend", "managedBy", "failurePolicy"):
        whole["spec"].pop(field, None)
    cut = job.spec.parallelism
    if cut.min_replicas is not None or job.spec.adaptation.relayout:
        # Such a job needs it. How many there may be, which an edit may change, the ingest knows.
        whole["spec"]["failurePolicy"] = {"maxRestarts": 1}
    whole["metadata"] = {"name": job.metadata.name, "namespace": job.metadata.namespace}
    whole |= {"apiVersion": names.API_VERSION, "kind": names.KIND}
    return json.dumps(whole, sort_keys=True)


def config_map(attempt: Attempt, config: OperatorConfig) -> Object:
    """ConfigMap with the job's file and the ingest's CA, as of the start of the attempt."""
    data = {pod.JOB_FILE: job_file(attempt.job)}
    if config.ca_pem:
        data[pod.CA_FILE] = config.ca_pem
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": attempt.metadata(attempt.name),
        "immutable": True,
        "data": data,
    }


def secret(attempt: Attempt, key: str) -> Object:
    """The engine's Secret, one per attempt: a pod of another attempt cannot join this one."""
    return _secret(attempt, attempt.name, "engine", {pod.SECRET_FILE: key})


def page_secret(attempt: Attempt, token: str) -> Object:
    """Secret of the live page, one per attempt. Who may read it may watch, and no more."""
    return _secret(attempt, attempt.page_secret, "page", {pod.PAGE_FILE: token})


def _secret(attempt: Attempt, name: str, use: str, data: dict[str, str]) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": attempt.metadata(name),
        "immutable": True,
        "type": f"{names.API_GROUP}/{use}",
        "stringData": data,
    }


def batch_job(attempt: Attempt, config: OperatorConfig) -> Object:
    """One Indexed Job: completion index = pod, with ``ranks_per_pod`` ranks. One failed rank ends
    the attempt, unless launchers start ranks again: then a lost pod is replaced."""
    labels = attempt.labels() | gang.job_labels(attempt.job)
    template = pod.template(attempt, config)
    spec: Object = {
        "completions": attempt.pods,
        "parallelism": attempt.pods,
        "completionMode": "Indexed",
        "podReplacementPolicy": "Failed",
        **(_replaces_pods() if pod.starts_again(template) else _ends_with_a_pod(template)),
        "template": template,
    }
    metadata = attempt.metadata(attempt.name, labels)
    if config.authorities:
        metadata["annotations"] = {names.AUTHORITIES: ",".join(sorted(config.authorities))}
    if not gang.queued_by_kueue(attempt.job):
        spec["suspend"] = False
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": spec,
    }


def _ends_with_a_pod(template: Object) -> Object:
    # policy.restart depends on the order: disruptions by the cluster come first.
    rules = [_disrupted("FailJob"), _exits_other_than(0)]
    # A container beside a trainer that has ended with 0: see reconcile.finishing.
    others = [c["name"] for c in template["spec"]["containers"] if c["name"] != pod.CONTAINER]
    ignored = {"operator": "NotIn", "values": [0]}
    for name in others[: MOST_RULES - len(rules)]:
        rules.append({"action": "Ignore", "onExitCodes": ignored | {"containerName": name}})
    return {"backoffLimit": 0, "podFailurePolicy": {"rules": rules}}


def _replaces_pods() -> Object:
    """A launcher ends with a code of its own if the attempt has to end."""
    return {
        # A pod that the Job controller has counted before the operator came is made again after
        # 10 s, then 20 s; after that a new Job is better.
        "backoffLimitPerIndex": BACKOFFS_PER_INDEX,
        "maxFailedIndexes": 0,
        "podFailurePolicy": {"rules": [_disrupted("Ignore"), _exits_other_than(0, *EXITS_LOST)]},
    }


def _disrupted(action: str) -> Object:
    return {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _exits_other_than(*codes: int) -> Object:
    named = {"containerName": pod.CONTAINER, "operator": "NotIn", "values": sorted(codes)}
    return {"action": "FailJob", "onExitCodes": named}
