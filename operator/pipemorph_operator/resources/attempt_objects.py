"""Builds the objects of an attempt: Service, NetworkPolicy, ConfigMap, Job, and the PodGroup of a
gang.

The engine's Secret is random, so the reconciler creates it once and never applies it again.
"""

from __future__ import annotations

import json

from pipemorph.exits import POD_LOST_EXITS
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph_operator import names
from pipemorph_operator.config import OperatorConfig
from pipemorph_operator.resources import gang, pod_builder
from pipemorph_operator.resources.attempt import Attempt, Object

BACKOFFS_PER_INDEX = 2
MAX_POLICY_RULES = 20
"""Kubernetes' limit of rules in a Job's podFailurePolicy."""


def build_objects(attempt: Attempt, config: OperatorConfig) -> list[Object]:
    """Objects to apply, in order: those that pods need precede the Job that creates the pods.

    Raises :class:`ResourceBuildError`.
    """
    out = [*build_lasting_objects(attempt, config), build_config_map(attempt, config)]
    made = build_batch_job(attempt, config)
    if (group := gang.build_pod_group(attempt, made["spec"]["template"])) is not None:
        out.append(group)
    return [*out, made]


def build_lasting_objects(attempt: Attempt, config: OperatorConfig) -> list[Object]:
    """Objects that are the same for all attempts, and can be created again if deleted."""
    policies = [build_network_policy(attempt, config)] if config.network_policies else []
    return [*policies, build_service(attempt)]


def build_service(attempt: Attempt) -> Object:
    """Headless Service: gives every rank's pod a stable DNS name, even before it is ready."""
    labels = {k: v for k, v in attempt.build_labels().items() if k != names.LABEL_ATTEMPT}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": attempt.build_metadata(attempt.service_name, labels),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.LABEL_JOB_UID: attempt.uid},
        },
    }


def build_network_policy(attempt: Attempt, config: OperatorConfig) -> Object:
    """NetworkPolicy, the same for all attempts: only ranks of the job reach each other's ports, for
    the rendezvous, collectives and the engine. It restricts no outgoing connections: data and
    checkpoints may be anywhere."""
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
        "metadata": build_service(attempt)["metadata"],
        "spec": {**ranks, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def build_job_file(job: PipeMorphJob) -> str:
    """The job's YAML for the ranks: only fields they need, so that older trainers can read it."""
    whole = job.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    for field in ("template", "placement", "suspend", "managedBy", "failurePolicy"):
        whole["spec"].pop(field, None)
    cut = job.spec.parallelism
    if cut.min_replicas is not None or job.spec.adaptation.relayout:
        # The spec of such a job needs restarts; only the ingest uses their number.
        whole["spec"]["failurePolicy"] = {"maxRestarts": 1}
    whole["metadata"] = {"name": job.metadata.name, "namespace": job.metadata.namespace}
    whole |= {"apiVersion": names.API_VERSION, "kind": names.KIND}
    return json.dumps(whole, sort_keys=True)


def build_config_map(attempt: Attempt, config: OperatorConfig) -> Object:
    """ConfigMap with the job's file and the ingest's CA, as of the start of the attempt."""
    data = {pod_builder.JOB_FILE: build_job_file(attempt.job)}
    if config.ca_pem:
        data[pod_builder.CA_FILE] = config.ca_pem
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": attempt.build_metadata(attempt.name),
        "immutable": True,
        "data": data,
    }


def build_engine_secret(attempt: Attempt, key: str) -> Object:
    """The engine's Secret, one per attempt: a pod of another attempt cannot join this one."""
    return _build_secret(attempt, attempt.name, "engine", {pod_builder.SECRET_FILE: key})


def build_page_secret(attempt: Attempt, token: str) -> Object:
    """Secret of the live page, one per attempt. Readers of it may watch the job, and no more."""
    return _build_secret(attempt, attempt.page_secret_name, "page", {pod_builder.PAGE_FILE: token})


def _build_secret(attempt: Attempt, name: str, use: str, data: dict[str, str]) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": attempt.build_metadata(name),
        "immutable": True,
        "type": f"{names.API_GROUP}/{use}",
        "stringData": data,
    }


def build_batch_job(attempt: Attempt, config: OperatorConfig) -> Object:
    """Indexed Job of an attempt: completion index = pod, with ``ranks_per_pod`` ranks. A failed
    rank ends the attempt, unless launchers start ranks again: then a lost pod is replaced."""
    labels = attempt.build_labels() | gang.build_kueue_labels(attempt.job)
    template = pod_builder.build_pod_template(attempt, config)
    spec: Object = {
        "completions": attempt.pods,
        "parallelism": attempt.pods,
        "completionMode": "Indexed",
        "podReplacementPolicy": "Failed",
        **(
            _build_replacement_fields()
            if pod_builder.restarts_ranks(template)
            else _build_fail_fast_fields(template)
        ),
        "template": template,
    }
    metadata = attempt.build_metadata(attempt.name, labels)
    if config.ca_fingerprints:
        metadata["annotations"] = {names.AUTHORITIES: ",".join(sorted(config.ca_fingerprints))}
    if not gang.is_queued_by_kueue(attempt.job):
        spec["suspend"] = False
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": spec,
    }


def _build_fail_fast_fields(template: Object) -> Object:
    # policy.attempt_end depends on the order: disruptions by the cluster come first.
    rules = [_build_disruption_rule("FailJob"), _build_exit_code_rule(0)]
    # Ignore failures of containers other than the trainer: see reconcile.completion.
    others = [
        c["name"] for c in template["spec"]["containers"] if c["name"] != pod_builder.CONTAINER
    ]
    ignored = {"operator": "NotIn", "values": [0]}
    for name in others[: MAX_POLICY_RULES - len(rules)]:
        rules.append({"action": "Ignore", "onExitCodes": ignored | {"containerName": name}})
    return {"backoffLimit": 0, "podFailurePolicy": {"rules": rules}}


def _build_replacement_fields() -> Object:
    """Fields of a Job that replaces pods. Exit codes outside ``POD_LOST_EXITS`` end the attempt."""
    return {
        # The Job controller replaces a pod that it counts before the operator acts, after 10 s,
        # then 20 s. After that a new Job is faster.
        "backoffLimitPerIndex": BACKOFFS_PER_INDEX,
        "maxFailedIndexes": 0,
        "podFailurePolicy": {
            "rules": [_build_disruption_rule("Ignore"), _build_exit_code_rule(0, *POD_LOST_EXITS)]
        },
    }


def _build_disruption_rule(action: str) -> Object:
    return {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _build_exit_code_rule(*codes: int) -> Object:
    named = {"containerName": pod_builder.CONTAINER, "operator": "NotIn", "values": sorted(codes)}
    return {"action": "FailJob", "onExitCodes": named}
