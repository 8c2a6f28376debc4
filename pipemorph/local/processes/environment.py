"""Builds the environment of a rank on this machine. Pure.

Later sources override earlier ones: the host's environment without launchers' variables; defaults
for one machine; ``env`` of the pod template's container ``trainer``; the trainer's variables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipemorph.errors import InputError
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.layout import Layout
from pipemorph.spec.sections.template import RESERVED_ENV, RESERVED_ENV_PREFIXES, TRAINER_CONTAINER

INHERITED_VARIABLES = frozenset({"PIPEMORPH_LOG"})
GRACE_SECONDS = 30.0
"""Default time from SIGTERM to SIGKILL, as in Kubernetes: ranks save meanwhile."""
MARGIN_SECONDS = 1.0
"""Part of the grace period that is reserved for a rank that could not save, to report its wait."""
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


@dataclass(frozen=True)
class AttemptEnvironment:
    """Addresses and files that the ranks of one generation share. ``memory_dir``: folder in which
    they save their state for the next one; None: none would read it. ``progress_dir``: of their
    counts of iterations. ``layout``: of the ranks. ``run``: id of all their generations in
    checkpoints."""

    run: str
    attempt: int
    generation: int
    master_port: int
    ingest_url: str
    job_file: Path
    secret_file: Path
    token_file: Path
    trace_dir: Path
    progress_dir: Path
    memory_dir: Path | None
    layout: Layout


def build_rank_environment(
    job: PipeMorphJob, where: AttemptEnvironment, rank: int, host: Mapping[str, str]
) -> dict[str, str]:
    """The complete environment of a rank, with the variables that the trainer's context reads."""
    world_size = str(job.spec.parallelism.world_size)
    saved = {} if where.memory_dir is None else {"PIPEMORPH_KEPT_DIR": str(where.memory_dir)}
    split = where.layout.layers
    layers = {"PIPEMORPH_LAYERS": json.dumps(split)} if split else {}
    return (
        build_common_environment(job, host)
        | saved
        | layers
        | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(where.master_port),
            "RANK": str(rank),
            # The device of its place, wherever the rank is in the mesh.
            "LOCAL_RANK": str(where.layout.places[rank]),
            "PIPEMORPH_PLACE": str(where.layout.places[rank]),
            "PIPEMORPH_PLACES": where.layout.places_json,
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
            "PIPEMORPH_JOB_FILE": str(where.job_file),
            "PIPEMORPH_ARGS": json.dumps(job.spec.trainer.args),
            "PIPEMORPH_NAMESPACE": job.metadata.namespace,
            "PIPEMORPH_RUN": where.run,
            "PIPEMORPH_ATTEMPT": str(where.attempt),
            "PIPEMORPH_GENERATION": str(where.generation),
            "PIPEMORPH_GRACE_SECONDS": f"{max(0.0, read_grace_seconds(job) - MARGIN_SECONDS):g}",
            "PIPEMORPH_SECRET_FILE": str(where.secret_file),
            "PIPEMORPH_INGEST_URL": where.ingest_url,
            "PIPEMORPH_TOKEN_FILE": str(where.token_file),
            "PIPEMORPH_TRACE_DIR": str(where.trace_dir),
            "PIPEMORPH_PROGRESS_DIR": str(where.progress_dir),
        }
    )


def build_common_environment(job: PipeMorphJob, host: Mapping[str, str]) -> dict[str, str]:
    """Variables that the ranks share in all attempts."""
    env = {name: value for name, value in host.items() if not is_reserved(name)}
    env |= {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(job.spec.trainer.threads),
    }
    # Makes Python print all threads' stacks on a crash in C++.
    env.setdefault("PYTHONFAULTHANDLER", "1")
    # This machine's host name may resolve to an address that is down or behind a firewall.
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return _apply_template(env, read_template_env(job)[0])


def read_template_env(job: PipeMorphJob) -> tuple[dict[str, str], list[str]]:
    """The variables of the trainer container in ``spec.template``, and the names of variables whose
    values need a cluster: with ``valueFrom`` or ``envFrom``.

    Raises :class:`InputError` for an invalid variable.
    """
    values: dict[str, str] = {}
    unavailable: list[str] = []
    for container in _list_containers(job.spec.template):
        if container.get("name") != TRAINER_CONTAINER:
            continue
        for entry in container.get("env") or []:
            if "valueFrom" in entry:
                unavailable.append(entry["name"])
            else:
                values[entry["name"]] = _read_plain_value(entry)
        if container.get("envFrom"):
            unavailable.append("envFrom")
    return values, unavailable


def read_grace_seconds(job: PipeMorphJob) -> float:
    """Seconds a rank may take to stop: ``terminationGracePeriodSeconds`` of the template.

    Raises :class:`InputError` if that is not a number of seconds.
    """
    stated = ((job.spec.template or {}).get("spec") or {}).get("terminationGracePeriodSeconds")
    if stated is None:
        return GRACE_SECONDS
    if isinstance(stated, bool) or not isinstance(stated, int) or stated < 0:
        raise InputError(
            f"spec.template.spec.terminationGracePeriodSeconds: is {stated!r}; "
            f"expected a whole number of seconds"
        )
    return float(stated)


def is_reserved(name: str) -> bool:
    """True if launchers set this variable, so that it must not be inherited."""
    reserved = name in RESERVED_ENV or name.startswith(RESERVED_ENV_PREFIXES)
    return reserved and name not in INHERITED_VARIABLES


def _read_plain_value(entry: dict[str, Any]) -> str:
    name, value = entry["name"], entry.get("value")
    text = "" if value is None else str(value)
    if "=" in name or "\0" in name or "\0" in text:
        raise InputError(
            f"spec.template: variable {name!r} contains a zero byte, or '=' in its name; "
            f"environment variables cannot"
        )
    return text


def _list_containers(template: dict[str, Any] | None) -> list[dict[str, Any]]:
    return list(((template or {}).get("spec") or {}).get("containers") or [])


def _apply_template(env: dict[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Add ``values``, expanding ``$(NAME)`` as kubelet does: to variables defined before; ``$$`` is
    a dollar, and unknown names stay unexpanded."""
    seen: dict[str, str] = {}
    for name, value in values.items():

        def expand_reference(match: re.Match[str]) -> str:
            if match.group(0) == "$$":
                return "$"
            return seen.get(match.group(1), match.group(0))

        seen[name] = _REFERENCE.sub(expand_reference, value)
    return env | seen
