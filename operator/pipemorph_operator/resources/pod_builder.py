"""Builds the pod template of an attempt: the user's template, completed to run ranks.

Adds the environment that ``pipemorph_trainer.context`` reads, the files it points to, and the
command, unless the user's template has one.
"""

from __future__ import annotations

import json
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from pipemorph.argument_types import LONGEST_SECONDS
from pipemorph.spec.base import FieldError
from pipemorph.spec.sections.placement import PlacementSpec
from pipemorph.spec.sections.template import (
    RESERVED_ENV,
    RESERVED_ENV_PREFIXES,
    TRAINER_CONTAINER,
    count_gpus,
)
from pipemorph_operator import names
from pipemorph_operator.config import OperatorConfig
from pipemorph_operator.resources import gang, placement, template_validation
from pipemorph_operator.resources.attempt import Attempt, ResourceBuildError

CONTAINER = TRAINER_CONTAINER
CONFIG_FOLDER = "/etc/pipemorph"
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
GENERATIONS_OPTION = "--generations"
"""Option of the launcher: start ranks again when the ingest begins a generation."""
STATE_VARIABLE = "PIPEMORPH_KEPT_DIR"
STATE_VOLUME = "pipemorph-kept"
"""Volume for the state of ranks. A template may define it itself, such as with another limit."""
STATE_FOLDER = "/run/pipemorph/kept"
STATE_LIMIT_DIVISOR = 2
"""Ratio of the trainer's memory limit to the volume's."""
KILL_MARGIN_SECONDS = 2
"""Part of the grace period that remains after the launcher has killed ranks that do not end."""
SAVE_MARGIN_SECONDS = 3
"""Part of the grace period that remains when a rank gives up saving and ends by itself."""
MAX_VARIABLE_BYTES, MAX_ARGS_BYTES = 100 * 1024, 512 * 1024
"""Limits of ``spec.trainer.args`` in bytes: in a variable, which Linux limits to 128 KiB with its
name, and in the job's file, whose ConfigMap holds 1 MiB."""
READABLE_MODE = 0o444
"""Readable by any user: the container's user may not own the files."""

Object = dict[str, Any]


def build_pod_template(attempt: Attempt, config: OperatorConfig) -> Object:
    """Build the pod template. Raises :class:`~pipemorph_operator.resources.ResourceBuildError`."""
    out = _build_base_template(attempt, config)
    metadata, spec = out.setdefault("metadata", {}), out["spec"]
    metadata["labels"] = {**(metadata.get("labels") or {}), **attempt.build_labels()}
    metadata["annotations"] = dict(metadata.get("annotations") or {})
    metadata["annotations"].setdefault("kubectl.kubernetes.io/default-container", CONTAINER)
    spec["restartPolicy"] = "Never"
    spec["subdomain"] = attempt.service_name
    spec.setdefault("enableServiceLinks", False)
    spec.setdefault("automountServiceAccountToken", False)
    if spec.get("hostNetwork") and spec.get("dnsPolicy", "ClusterFirst") == "ClusterFirst":
        # With hostNetwork, ClusterFirst is the node's resolver, which resolves no Service names.
        spec["dnsPolicy"] = "ClusterFirstWithHostNet"
    if _is_only_container(spec):
        # Makes the pause container process 1. The kernel drops a SIGTERM that process 1 does not
        # handle: a rank that is deleted during its imports would run for the whole grace period.
        spec.setdefault("shareProcessNamespace", True)
    trainer = next(c for c in spec["containers"] if c["name"] == CONTAINER)
    if "command" not in trainer:
        trainer["command"] = _build_command(attempt, spec)
    page = _command_contains(trainer, "pipemorph_trainer.launcher")
    spec["volumes"] = [*(spec.get("volumes") or []), *_build_volumes(attempt, page=page)]
    generations = attempt.restarts_in_pods and _command_contains(trainer, GENERATIONS_OPTION)
    cut = attempt.job.spec.parallelism
    needing = {
        "parallelism.minReplicas": cut.min_replicas is not None,
        "adaptation.relayout": attempt.job.spec.adaptation.relayout,
    }
    if any(needing.values()) and not generations:
        field = next(field for field, is_set in needing.items() if is_set)
        raise ResourceBuildError(
            names.R_INVALID_SPEC,
            f"spec.{field} is set, but ranks do not start again within their pods: "
            "set spec.failurePolicy.maxRestarts to at least 1, and omit the command or let it "
            f"start the launcher with {GENERATIONS_OPTION}",
        )
    trainer["env"] = _build_environment(
        attempt,
        config,
        trainer.get("env") or [],
        generations=generations,
        page=page,
        grace=_read_grace_seconds(spec),
    )
    _declare_metrics_ports(attempt, spec, trainer)
    trainer["volumeMounts"] = [*(trainer.get("volumeMounts") or []), *_build_mounts(page=page)]
    if generations:
        _mount_state_volume(spec, trainer)
    trainer.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    try:
        placement.apply_placement(attempt, out, trainer)
    except FieldError as error:
        raise _wrap_field_error(error) from None
    if attempt.job.spec.template is None:
        _restrict_container(trainer)
    gang.add_gang_fields(attempt, out)
    return out


def _wrap_field_error(error: FieldError) -> Exception:
    return ResourceBuildError(names.R_INVALID_SPEC, f"spec.template.{error}")


def _restrict_container(trainer: Object) -> None:
    """Make the default container pass the restricted Pod Security Standard, unless the placement
    needs a capability, which only user 0 can use."""
    context = trainer.setdefault("securityContext", {})
    if "capabilities" not in context:
        context["runAsNonRoot"] = True
    context.setdefault("capabilities", {})["drop"] = ["ALL"]
    context["allowPrivilegeEscalation"] = False
    context["seccompProfile"] = {"type": "RuntimeDefault"}


def _is_only_container(spec: Object) -> bool:
    """True if the trainer shares its process namespace with no other container or the host."""
    others = [*spec["containers"][1:], *(spec.get("initContainers") or [])]
    return not others and not spec.get("hostPID")


def _build_base_template(attempt: Attempt, config: OperatorConfig) -> Object:
    spec = attempt.job.spec
    if spec.template is None:
        if not config.trainer_image:
            raise ResourceBuildError(
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
        out = template_validation.validate_pod_template(spec.template)
    except FieldError as error:
        raise _wrap_field_error(error) from None
    restart = out["spec"].get("restartPolicy", "Never")
    if restart != "Never":
        raise ResourceBuildError(
            names.R_INVALID_SPEC,
            f"spec.template.spec.restartPolicy is {restart}; expected Never, because all ranks "
            "restart together",
        )
    containers = [c for c in out["spec"]["containers"] if c["name"] == CONTAINER]
    if config.trainer_image:
        containers[0].setdefault("image", config.trainer_image)
    if "image" not in containers[0]:
        raise ResourceBuildError(
            names.R_NO_IMAGE,
            f"spec.template: container {CONTAINER} has no image and the operator has no default; "
            "give one, or set the value trainer.image of the Helm chart",
        )
    return out


def _build_command(attempt: Attempt, spec: Object) -> list[str]:
    """Command of the trainer: the preflight, which becomes the launcher if its checks pass. The
    launcher runs the program once per rank of the pod, and again after failures if allowed."""
    wanted = attempt.job.spec.placement or PlacementSpec()
    command = ["python", "-m", "pipemorph_trainer.preflight"]
    if wanted.rdma is not None:
        command.append("--rdma")
        if wanted.rdma.ipc_lock:
            command.append("--memlock")
    if wanted.shared_memory is not None:
        command.append(f"--shm={parse_memory_bytes(wanted.shared_memory) or 0}")
    command += ["--", "python", "-m", "pipemorph_trainer.launcher"]
    if attempt.restarts_in_pods:
        command.append(GENERATIONS_OPTION)
    command.append(f"--grace={max(0.0, _read_grace_seconds(spec) - KILL_MARGIN_SECONDS):g}")
    return [*command, "--", *attempt.job.spec.trainer.build_argv("python")]


def _read_grace_seconds(spec: Object) -> float:
    """Seconds from SIGTERM to SIGKILL. The API server rejects a value that is not a number."""
    stated = spec.get("terminationGracePeriodSeconds", POD_GRACE_SECONDS)
    return min(float(stated if isinstance(stated, int) else POD_GRACE_SECONDS), LONGEST_SECONDS)


def restarts_ranks(template: Object) -> bool:
    """True if the launchers in pods of this built template start ranks again."""
    trainer = next(c for c in template["spec"]["containers"] if c["name"] == CONTAINER)
    return any(variable["name"] == STATE_VARIABLE for variable in trainer["env"])


def _command_contains(trainer: Object, what: str) -> bool:
    """True if a word of the container's command or arguments contains ``what``."""
    words = [*(trainer["command"] or []), *(trainer.get("args") or [])]
    return any(what in str(word) for word in words)


def _build_environment(
    attempt: Attempt,
    config: OperatorConfig,
    given: list[Object],
    *,
    generations: bool,
    page: bool,
    grace: float,
) -> list[Object]:
    """Variables of the rank, then the user's, which may refer to them."""
    spec = attempt.job.spec
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{names.COMPLETION_INDEX}']"}}
    ranks = spec.parallelism.ranks_per_pod
    own: dict[str, str | Object] = {"RANK": index, "LOCAL_RANK": "0"}
    values: dict[str, str | Object] = {
        # With several ranks, the launcher sets these for each of them.
        **(own if ranks == 1 else {}),
        "PIPEMORPH_POD_INDEX": index,
        "WORLD_SIZE": str(attempt.ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": attempt.master_address,
        "MASTER_PORT": str(MASTER_PORT),
        "PIPEMORPH_JOB_FILE": f"{CONFIG_FOLDER}/job/{JOB_FILE}",
        **_build_args_variable(spec.trainer.args),
        "PIPEMORPH_NAMESPACE": attempt.namespace,
        "PIPEMORPH_RUN": attempt.uid,
        "PIPEMORPH_ATTEMPT": str(attempt.number),
        "PIPEMORPH_SECRET_FILE": f"{CONFIG_FOLDER}/secret/{SECRET_FILE}",
        "PIPEMORPH_INGEST_URL": config.ingest_url,
        "PIPEMORPH_TOKEN_FILE": f"{CONFIG_FOLDER}/token/{TOKEN_FILE}",
        "PIPEMORPH_GRACE_SECONDS": f"{max(0.0, grace - SAVE_MARGIN_SECONDS):g}",
    }
    policy = spec.failure_policy
    for name, seconds in (("HANG", policy.hang_seconds), ("START", policy.start_seconds)):
        if seconds is not None:
            values[f"PIPEMORPH_{name}_SECONDS"] = str(seconds)
    if spec.trainer.metrics_port:
        values["PIPEMORPH_METRICS_PORT"] = str(spec.trainer.metrics_port)
    if generations:
        values[STATE_VARIABLE] = STATE_FOLDER
    if page:
        values["PIPEMORPH_PAGE_PORT"] = str(PAGE_PORT)
        values["PIPEMORPH_PAGE_TOKEN_FILE"] = f"{CONFIG_FOLDER}/page/{PAGE_FILE}"
        values["PIPEMORPH_POD_GPUS"] = str(count_gpus(spec.template))
    if spec.parallelism.min_replicas is not None or spec.adaptation.relayout:
        # Any pod may host rank 0.
        values["PIPEMORPH_POD_ADDRESS"] = attempt.pod_address
    if config.ca_pem:
        values["PIPEMORPH_CA_FILE"] = f"{CONFIG_FOLDER}/job/{CA_FILE}"
    ours = [_build_variable(name, value) for name, value in values.items()]
    theirs = [v for v in given if not is_reserved_variable(v["name"])]
    names_given = {v["name"] for v in theirs}
    defaults = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(spec.trainer.threads)}
    return [
        *ours,
        *theirs,
        *(_build_variable(k, v) for k, v in defaults.items() if k not in names_given),
    ]


def _build_args_variable(given: Object) -> dict[str, str | Object]:
    """Variable with the arguments; none if they are too long for one: ranks then read the job's
    file. Raises :class:`ResourceBuildError` if they are too long for a ConfigMap."""
    text = json.dumps(given, sort_keys=True)
    if len(text) > MAX_ARGS_BYTES:
        raise ResourceBuildError(
            names.R_INVALID_SPEC,
            f"spec.trainer.args is {len(text):,} bytes of JSON; expected at most"
            f" {MAX_ARGS_BYTES:,}: put large values into a file that the template mounts, and pass"
            " its path",
        )
    return {"PIPEMORPH_ARGS": text} if len(text) <= MAX_VARIABLE_BYTES else {}


def _declare_metrics_ports(attempt: Attempt, spec: Object, trainer: Object) -> None:
    """Declare the ranks' metrics ports. A PodMonitor selects them by name.

    Skips pods with hostNetwork: there, a declared port is reserved on the node for one pod.
    """
    first = attempt.job.spec.trainer.metrics_port
    ports = trainer.get("ports") or []
    readable = isinstance(ports, list) and all(isinstance(p, dict) for p in ports)
    if not first or not readable or spec.get("hostNetwork"):
        return
    taken = {p.get("name") for p in ports} | {p.get("containerPort") for p in ports}
    own = []
    for local_rank in range(attempt.job.spec.parallelism.ranks_per_pod):
        name, port = build_metrics_port_name(local_rank), first + local_rank
        if name not in taken and port not in taken:
            own.append({"name": name, "containerPort": port})
    if own:
        trainer["ports"] = [*ports, *own]


def build_metrics_port_name(local_rank: int) -> str:
    """``pm-metrics``, ``pm-metrics-1``, …"""
    return METRICS_PORT if local_rank == 0 else f"{METRICS_PORT}-{local_rank}"


def count_idle_gpus(attempt: Attempt) -> int:
    """GPUs that the user's template requests for a pod, beyond one for each of its ranks."""
    spec = attempt.job.spec
    return max(0, count_gpus(spec.template) - spec.parallelism.ranks_per_pod)


def is_reserved_variable(name: str) -> bool:
    return name in RESERVED_ENV or name.startswith(RESERVED_ENV_PREFIXES)


def _build_variable(name: str, value: str | Object) -> Object:
    if isinstance(value, str):
        # Kubernetes expands $(NAME) and turns $$ into $: escape every dollar.
        return {"name": name, "value": value.replace("$", "$$")}
    return {"name": name, "valueFrom": value}


def _build_volumes(attempt: Attempt, *, page: bool) -> list[Object]:
    secret = {"secretName": attempt.page_secret_name, "defaultMode": READABLE_MODE}
    token = {
        "path": TOKEN_FILE,
        "audience": attempt.token_audience,
        "expirationSeconds": TOKEN_SECONDS,
    }
    return [
        {
            "name": "pipemorph-job",
            "configMap": {"name": attempt.name, "defaultMode": READABLE_MODE},
        },
        {
            "name": "pipemorph-secret",
            "secret": {"secretName": attempt.name, "defaultMode": READABLE_MODE},
        },
        {
            "name": "pipemorph-token",
            "projected": {
                "defaultMode": READABLE_MODE,
                "sources": [{"serviceAccountToken": token}],
            },
        },
        *([{"name": PAGE_VOLUME, "secret": secret}] if page else []),
    ]


def _build_mounts(*, page: bool) -> list[Object]:
    return [
        {"name": f"pipemorph-{what}", "mountPath": f"{CONFIG_FOLDER}/{what}", "readOnly": True}
        for what in ("job", "secret", "token", *(["page"] if page else []))
    ]


# --- the volume in memory for the state of ranks ----------------------------------------------
#
# Ranks store copies of their state in it for their successors in the pod. Its content counts as
# memory of the trainer container, so its limit is half of that container's: copies must not get the
# ranks killed. A rank whose copies do not fit stores none, and logs that.


def _mount_state_volume(spec: Object, trainer: Object) -> None:
    """Add the volume to a pod's ``spec``, unless it has it, and mount it in its trainer."""
    volumes = spec.setdefault("volumes", [])
    if not any(volume.get("name") == STATE_VOLUME for volume in volumes):
        volumes.append(
            {"name": STATE_VOLUME, "emptyDir": {"medium": "Memory"} | _build_state_limit(trainer)}
        )
    trainer["volumeMounts"].append({"name": STATE_VOLUME, "mountPath": STATE_FOLDER})


def _build_state_limit(trainer: Object) -> Object:
    """Size limit of the volume; none if the trainer has no limit: then the node's applies."""
    limits = (trainer.get("resources") or {}).get("limits") or {}
    found = parse_memory_bytes(str(limits.get("memory", "")))
    return {"sizeLimit": str(found // STATE_LIMIT_DIVISOR)} if found is not None else {}


def parse_memory_bytes(quantity: str) -> int | None:
    """Bytes of a Kubernetes quantity; None for values below 1 and for other text, both invalid."""
    try:
        size = int(parse_quantity(quantity))  # type: ignore[no-untyped-call]
    except ValueError:
        return None
    return size if size > 0 else None
