"""The pod template of an attempt: the user's, completed for running a rank.

Adds the environment that ``pipemorph_trainer.context`` reads, the files it points to, and the
command, unless the user's template has one.
"""

from __future__ import annotations

import json
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from pipemorph.api.base import FieldError
from pipemorph.api.sections.placement import Placement
from pipemorph.api.sections.template import (
    RESERVED_ENV,
    RESERVED_ENV_PREFIXES,
    TRAINER_CONTAINER,
    gpus,
)
from pipemorph.arguments import LONGEST_SECONDS
from pipemorph_operator import names
from pipemorph_operator.children import gang, placement, pod_template
from pipemorph_operator.children.attempt import Attempt, Unbuildable
from pipemorph_operator.config import OperatorConfig

CONTAINER = TRAINER_CONTAINER
FOLDER = "/etc/pipemorph"
JOB_FILE = "job.json"
CA_FILE = "ca.crt"
SECRET_FILE = "engine"
TOKEN_FILE = "token"
PAGE_FILE = "token"
PAGE_PORT = 9450
"""Loopback port of the live page, in the pod with rank 0."""
PAGE_VOLUME = "pipemorph-page"
"""Volume with the page's token; by it, `pipemorph watch` finds the Secret."""
MASTER_PORT = 29500
METRICS_PORT = "pm-metrics"
"""Name of the port of a rank's metrics."""
TOKEN_SECONDS = 3600
POD_GRACE_SECONDS = 30
"""Kubernetes' default of ``terminationGracePeriodSeconds``."""
GENERATIONS = "--generations"
"""The launcher's option: start ranks again when the ingest says so."""
KEPT_VARIABLE = "PIPEMORPH_KEPT_DIR"
KEPT_VOLUME = "pipemorph-kept"
"""A template may have a volume of this name, such as one with another limit."""
KEPT_FOLDER = "/run/pipemorph/kept"
KEPT_SHARE = 2
"""The trainer's memory limit over the volume's."""
MARGIN_SECONDS = 2
"""Of that, what is left when the launcher has killed ranks that do not end."""
SAVE_MARGIN_SECONDS = 3
"""And what is left when a rank that could not save ends by itself."""
MOST_VARIABLE, MOST_ARGS = 100 * 1024, 512 * 1024
"""Bytes of ``spec.trainer.args`` in a variable, for which Linux has room for 128 KiB with its name,
and in the job's file, whose ConfigMap holds 1 MiB."""
READABLE = 0o444
"""Readable by any user: the container's user may not own the files."""

Object = dict[str, Any]


def template(attempt: Attempt, config: OperatorConfig) -> Object:
    """Raises :class:`~pipemorph_operator.children.Unbuildable`."""
    out = _start(attempt, config)
    metadata, spec = out.setdefault("metadata", {}), out["spec"]
    metadata["labels"] = {**(metadata.get("labels") or {}), **attempt.labels()}
    metadata["annotations"] = dict(metadata.get("annotations") or {})
    metadata["annotations"].setdefault("kubectl.kubernetes.io/default-container", CONTAINER)
    spec["restartPolicy"] = "Never"
    spec["subdomain"] = attempt.service
    spec.setdefault("enableServiceLinks", False)
    spec.setdefault("automountServiceAccountToken", False)
    if spec.get("hostNetwork") and spec.get("dnsPolicy", "ClusterFirst") == "ClusterFirst":
        # With it, that is the node's resolver, which knows neither the ranks nor the ingest.
        spec["dnsPolicy"] = "ClusterFirstWithHostNet"
    if _alone(spec):
        # Makes the pause container process 1. The kernel drops a SIGTERM that process 1 does not
        # handle: a rank deleted while it imports would run for the whole grace period.
        spec.setdefault("shareProcessNamespace", True)
    trainer = next(c for c in spec["containers"] if c["name"] == CONTAINER)
    if "command" not in trainer:
        trainer["command"] = _command(attempt, spec)
    page = _calls(trainer, "pipemorph_trainer.launcher")
    spec["volumes"] = [*(spec.get("volumes") or []), *_volumes(attempt, page=page)]
    generations = attempt.recovers and _calls(trainer, GENERATIONS)
    cut = attempt.job.spec.parallelism
    needing = {
        "parallelism.minReplicas": cut.min_replicas is not None,
        "adaptation.relayout": attempt.job.spec.adaptation.relayout,
    }
    if any(needing.values()) and not generations:
        field = next(field for field, is_set in needing.items() if is_set)
        raise Unbuildable(
            names.R_INVALID_SPEC,
            f"spec.{field} is set, and ranks do not start again within their pods: "
            "set spec.failurePolicy.maxRestarts to at least 1, and leave the command to the "
            f"operator or start the launcher with {GENERATIONS}",
        )
    trainer["env"] = _environment(
        attempt,
        config,
        trainer.get("env") or [],
        generations=generations,
        page=page,
        grace=_grace(spec),
    )
    _open_metrics(attempt, spec, trainer)
    trainer["volumeMounts"] = [*(trainer.get("volumeMounts") or []), *_mounts(page=page)]
    if generations:
        _mount_kept(spec, trainer)
    trainer.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    try:
        placement.place(attempt, out, trainer)
    except FieldError as error:
        raise _unbuildable(error) from None
    if attempt.job.spec.template is None:
        _restrict(trainer)
    gang.mark_pods(attempt, out)
    return out


def _unbuildable(error: FieldError) -> Exception:
    return Unbuildable(names.R_INVALID_SPEC, f"spec.template.{error}")


def _restrict(trainer: Object) -> None:
    """Make the default container pass the restricted Pod Security Standard, unless the placement
    needs a capability, which only user 0 can use."""
    context = trainer.setdefault("securityContext", {})
    if "capabilities" not in context:
        context["runAsNonRoot"] = True
    context.setdefault("capabilities", {})["drop"] = ["ALL"]
    context["allowPrivilegeEscalation"] = False
    context["seccompProfile"] = {"type": "RuntimeDefault"}


def _alone(spec: Object) -> bool:
    """Whether sharing the process namespace exposes the trainer to no other container."""
    others = [*spec["containers"][1:], *(spec.get("initContainers") or [])]
    return not others and not spec.get("hostPID")


def _start(attempt: Attempt, config: OperatorConfig) -> Object:
    spec = attempt.job.spec
    if spec.template is None:
        if not config.trainer_image:
            raise Unbuildable(
                names.R_NO_IMAGE,
                "spec.template is missing and the operator has no default trainer image; set the "
                "value trainer.image of the Helm chart, or give a pod template with a container "
                f"named {CONTAINER}",
            )
        container = {"name": CONTAINER, "image": config.trainer_image}
        if config.trainer_pull_policy:
            container["imagePullPolicy"] = config.trainer_pull_policy
        return {"spec": {"containers": [container]}}
    try:
        out = pod_template.pod_template(spec.template)
    except FieldError as error:
        raise _unbuildable(error) from None
    restart = out["spec"].get("restartPolicy", "Never")
    if restart != "Never":
        raise Unbuildable(
            names.R_INVALID_SPEC,
            f"spec.template.spec.restartPolicy is {restart}; expected Never, since all ranks "
            "restart together",
        )
    containers = [c for c in out["spec"]["containers"] if c["name"] == CONTAINER]
    if config.trainer_image:
        containers[0].setdefault("image", config.trainer_image)
    if "image" not in containers[0]:
        raise Unbuildable(
            names.R_NO_IMAGE,
            f"spec.template: container {CONTAINER} has no image and the operator has no default; "
            "give one, or set the value trainer.image of the Helm chart",
        )
    return out


def _command(attempt: Attempt, spec: Object) -> list[str]:
    """The preflight's command. If its checks pass, it becomes the launcher, which runs the training
    program once per rank of the pod, again after failures if ranks may start again."""
    asked = attempt.job.spec.placement or Placement()
    command = ["python", "-m", "pipemorph_trainer.preflight"]
    if asked.rdma is not None:
        command.append("--rdma")
        if asked.rdma.ipc_lock:
            command.append("--memlock")
    if asked.shared_memory is not None:
        command.append(f"--shm={memory_bytes(asked.shared_memory) or 0}")
    command += ["--", "python", "-m", "pipemorph_trainer.launcher"]
    if attempt.recovers:
        command.append(GENERATIONS)
    command.append(f"--grace={max(0.0, _grace(spec) - MARGIN_SECONDS):g}")
    return [*command, "--", *attempt.job.spec.trainer.argv("python")]


def _grace(spec: Object) -> float:
    """Seconds from SIGTERM to SIGKILL. The API server refuses what is not a number."""
    stated = spec.get("terminationGracePeriodSeconds", POD_GRACE_SECONDS)
    return min(float(stated if isinstance(stated, int) else POD_GRACE_SECONDS), LONGEST_SECONDS)


def starts_again(template: Object) -> bool:
    """Whether the launchers in pods of a finished template start ranks again."""
    trainer = next(c for c in template["spec"]["containers"] if c["name"] == CONTAINER)
    return any(variable["name"] == KEPT_VARIABLE for variable in trainer["env"])


def _calls(trainer: Object, what: str) -> bool:
    """Whether the container's command, which may be the template's, has ``what`` in a word."""
    words = [*(trainer["command"] or []), *(trainer.get("args") or [])]
    return any(what in str(word) for word in words)


def _environment(
    attempt: Attempt,
    config: OperatorConfig,
    given: list[Object],
    *,
    generations: bool,
    page: bool,
    grace: float,
) -> list[Object]:
    """The rank's variables, then the user's, which may refer to them."""
    spec = attempt.job.spec
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{names.COMPLETION_INDEX}']"}}
    ranks = spec.parallelism.ranks_per_pod
    own: dict[str, str | Object] = {"RANK": index, "LOCAL_RANK": "0"}
    values: dict[str, str | Object] = {
        # With several ranks the launcher gives each of them its own.
        **(own if ranks == 1 else {}),
        "PIPEMORPH_POD_INDEX": index,
        "WORLD_SIZE": str(attempt.ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": attempt.master_address,
        "MASTER_PORT": str(MASTER_PORT),
        "PIPEMORPH_JOB_FILE": f"{FOLDER}/job/{JOB_FILE}",
        **_args(spec.trainer.args),
        "PIPEMORPH_NAMESPACE": attempt.namespace,
        "PIPEMORPH_RUN": attempt.uid,
        "PIPEMORPH_ATTEMPT": str(attempt.number),
        "PIPEMORPH_SECRET_FILE": f"{FOLDER}/secret/{SECRET_FILE}",
        "PIPEMORPH_INGEST_URL": config.ingest_url,
        "PIPEMORPH_TOKEN_FILE": f"{FOLDER}/token/{TOKEN_FILE}",
        "PIPEMORPH_GRACE_SECONDS": f"{max(0.0, grace - SAVE_MARGIN_SECONDS):g}",
    }
    policy = spec.failure_policy
    for name, seconds in (("HANG", policy.hang_seconds), ("START", policy.start_seconds)):
        if seconds is not None:
            values[f"PIPEMORPH_{name}_SECONDS"] = str(seconds)
    if spec.trainer.metrics_port:
        values["PIPEMORPH_METRICS_PORT"] = str(spec.trainer.metrics_port)
    if generations:
        values[KEPT_VARIABLE] = KEPT_FOLDER
    if page:
        values["PIPEMORPH_PAGE_PORT"] = str(PAGE_PORT)
        values["PIPEMORPH_PAGE_TOKEN_FILE"] = f"{FOLDER}/page/{PAGE_FILE}"
        values["PIPEMORPH_POD_GPUS"] = str(gpus(spec.template))
    if spec.parallelism.min_replicas is not None or spec.adaptation.relayout:
        # Any pod may have rank 0.
        values["PIPEMORPH_POD_ADDRESS"] = attempt.pod_address
    if config.ca_pem:
        values["PIPEMORPH_CA_FILE"] = f"{FOLDER}/job/{CA_FILE}"
    ours = [_variable(name, value) for name, value in values.items()]
    theirs = [v for v in given if not is_reserved(v["name"])]
    names_given = {v["name"] for v in theirs}
    defaults = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(spec.trainer.threads)}
    return [
        *ours,
        *theirs,
        *(_variable(k, v) for k, v in defaults.items() if k not in names_given),
    ]


def _args(given: Object) -> dict[str, str | Object]:
    """The arguments as a variable; none if they are too long for one: the ranks then read them in
    the job's file. Raises :class:`Unbuildable` for more than a ConfigMap holds."""
    text = json.dumps(given, sort_keys=True)
    if len(text) > MOST_ARGS:
        raise Unbuildable(
            names.R_INVALID_SPEC,
            f"spec.trainer.args is {len(text):,} bytes of JSON; expected at most {MOST_ARGS:,}: put"
            " what is larger into a file that the template mounts, and name the file",
        )
    return {"PIPEMORPH_ARGS": text} if len(text) <= MOST_VARIABLE else {}


def _open_metrics(attempt: Attempt, spec: Object, trainer: Object) -> None:
    """Declare the ranks' metrics ports, by whose names a PodMonitor finds them.

    Not with hostNetwork: a declared port is then reserved on the node, for one pod only.
    """
    first = attempt.job.spec.trainer.metrics_port
    ports = trainer.get("ports") or []
    readable = isinstance(ports, list) and all(isinstance(p, dict) for p in ports)
    if not first or not readable or spec.get("hostNetwork"):
        return
    taken = {p.get("name") for p in ports} | {p.get("containerPort") for p in ports}
    own = []
    for local_rank in range(attempt.job.spec.parallelism.ranks_per_pod):
        name, port = metrics_port_name(local_rank), first + local_rank
        if name not in taken and port not in taken:
            own.append({"name": name, "containerPort": port})
    if own:
        trainer["ports"] = [*ports, *own]


def metrics_port_name(local_rank: int) -> str:
    """``pm-metrics``, ``pm-metrics-1``, …"""
    return METRICS_PORT if local_rank == 0 else f"{METRICS_PORT}-{local_rank}"


def idle_gpus(attempt: Attempt) -> int:
    """GPUs that the user's template requests for a pod, beyond one for each of its ranks."""
    spec = attempt.job.spec
    return max(0, gpus(spec.template) - spec.parallelism.ranks_per_pod)


def is_reserved(name: str) -> bool:
    return name in RESERVED_ENV or name.startswith(RESERVED_ENV_PREFIXES)


def _variable(name: str, value: str | Object) -> Object:
    if isinstance(value, str):
        # Kubernetes expands $(NAME) and turns $$ into $: escape every dollar.
        return {"name": name, "value": value.replace("$", "$$")}
    return {"name": name, "valueFrom": value}


def _volumes(attempt: Attempt, *, page: bool) -> list[Object]:
    secret = {"secretName": attempt.page_secret, "defaultMode": READABLE}
    token = {
        "path": TOKEN_FILE,
        "audience": attempt.audience,
        "expirationSeconds": TOKEN_SECONDS,
    }
    return [
        {
            "name": "pipemorph-job",
            "configMap": {"name": attempt.name, "defaultMode": READABLE},
        },
        {
            "name": "pipemorph-secret",
            "secret": {"secretName": attempt.name, "defaultMode": READABLE},
        },
        {
            "name": "pipemorph-token",
            "projected": {"defaultMode": READABLE, "sources": [{"serviceAccountToken": token}]},
        },
        *([{"name": PAGE_VOLUME, "secret": secret}] if page else []),
    ]


def _mounts(*, page: bool) -> list[Object]:
    return [
        {"name": f"pipemorph-{what}", "mountPath": f"{FOLDER}/{what}", "readOnly": True}
        for what in ("job", "secret", "token", *(["page"] if page else []))
    ]


# --- the volume in memory for the state of ranks ----------------------------------------------
#
# Ranks leave their state in it for those that come after them in the pod. What it holds counts as
# memory of the trainer container. So it may have half of what that container may use: the copies
# must not be what ends the ranks. A rank for whose copies there is no room keeps none and says so.


def _mount_kept(spec: Object, trainer: Object) -> None:
    """Add the volume to a pod's ``spec``, unless it has it, and mount it in its trainer."""
    volumes = spec.setdefault("volumes", [])
    if not any(volume.get("name") == KEPT_VOLUME for volume in volumes):
        volumes.append(
            {"name": KEPT_VOLUME, "emptyDir": {"medium": "Memory"} | _kept_size(trainer)}
        )
    trainer["volumeMounts"].append({"name": KEPT_VOLUME, "mountPath": KEPT_FOLDER})


def _kept_size(trainer: Object) -> Object:
    """The volume's limit; none, so that of the node, if the trainer has none."""
    limits = (trainer.get("resources") or {}).get("limits") or {}
    found = memory_bytes(str(limits.get("memory", "")))
    return {"sizeLimit": str(found // KEPT_SHARE)} if found is not None else {}


def memory_bytes(quantity: str) -> int | None:
    """Bytes of a Kubernetes quantity; None for other text and for less than a byte, which the API
    server refuses."""
    try:
        size = int(parse_quantity(quantity))  # type: ignore[no-untyped-call]
    except ValueError:
        return None
    return size if size > 0 else None
