"""Context of a rank: the environment variables of torchrun and of PipeMorph's hosts.

====================== ==========================================================
variable               meaning
====================== ==========================================================
RANK, WORLD_SIZE, …    as torchrun sets them (``PET_*`` names are read as well)
PIPEMORPH_JOB_FILE     the PipeMorphJob as JSON; default: the ingest's job, and without an
                       ingest the arguments of the script
PIPEMORPH_ARGS         ``spec.trainer.args`` as JSON; default: those of the job
PIPEMORPH_NAMESPACE    namespace of the job
PIPEMORPH_ATTEMPT      attempt number, from 0; default: torchrun's restart count
PIPEMORPH_SECRET_FILE  file with the attempt's engine secret
PIPEMORPH_INGEST_URL   base URL of the ingest; without it there is no agent
PIPEMORPH_TOKEN_FILE   file with the bearer token for the ingest
PIPEMORPH_CA_FILE      PEM file with the authority of the ingest's certificate
PIPEMORPH_METRICS_PORT port of the rank's Prometheus metrics; without it none
PIPEMORPH_TRACE_DIR    folder for per-rank op traces; without it none are written
PIPEMORPH_TRACE_BYTES  most bytes of a rank's op trace; default 256 MiB
PIPEMORPH_KEPT_DIR     folder in memory for copies of the ranks' state; without it none
                       are made
PIPEMORPH_PROGRESS_DIR folder in which the rank counts its finished iterations, for a host that
                       detects hangs; without it none are counted
PIPEMORPH_RUN          name of all attempts and generations of the job's ranks, in checkpoints;
                       default: the id that torchrun or Slurm gives the job
PIPEMORPH_GENERATION   number of this life of the attempt's ranks, from 0
PIPEMORPH_PLACE        number of the place that runs this rank and has its copies; default:
                       RANK
PIPEMORPH_PLACES       places of the ranks, by rank, as JSON; default: that of its number. See
                       :mod:`pipemorph.spec.layout`
PIPEMORPH_LAYERS       number of layers of each stage, as JSON; default: divided evenly
PIPEMORPH_GRACE_SECONDS
                       seconds after a SIGTERM in which the rank may save; default 25
====================== ==========================================================

``spec.parallelism.order`` sets the coordinate of a rank: see :meth:`TrainerContext.coordinate`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import ValidationError
from tenacity import Retrying

from pipemorph.errors import InputError, one_line
from pipemorph.extras import require_torch_version
from pipemorph.http_client import (
    HttpClient,
    HttpResponse,
    NoResponseError,
    TokenUnreadableError,
    make_retry_options,
    validate_url,
)
from pipemorph.manifest import MAX_BYTES, describe_job_error
from pipemorph.planning.ir import StagePlacement
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.layout import Layout
from pipemorph.spec.mesh import Coordinate, MeshShape
from pipemorph.yaml_json import read_text

TRACE_BYTES = 256 << 20
LEAST_TRACE_BYTES = 1 << 16
GRACE_SECONDS = 25.0
"""Grace period, seconds: less than the 30 s of torchrun and Slurm by default."""


@dataclass(frozen=True)
class TrainerContext:
    """Identity and configuration of a rank. Build it with :meth:`from_env`."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    job: PipeMorphJob | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    namespace: str = "default"
    attempt: int = 0
    secret: bytes = b""
    ingest_url: str | None = None
    token_file: Path | None = None
    trace_dir: Path | None = None
    trace_bytes: int = TRACE_BYTES
    metrics_port: int = 0
    local_world_size: int = 1
    """Number of ranks on this machine, or in this pod."""
    memory_dir: Path | None = None
    place: int | None = None
    """Place that runs this rank; None: that of its number."""
    progress_dir: Path | None = None
    generation: int = 0
    run_name: str = ""
    """Name of the run: all lives of the job's ranks; empty: no name."""
    places: str | None = None
    """Places of the ranks, by rank, as JSON; None: that of its number."""
    layers: str | None = None
    """Number of layers of each stage, as JSON; None: divided evenly."""
    grace_seconds: float = GRACE_SECONDS
    """Seconds after a SIGTERM in which the rank may save."""

    @staticmethod
    def from_env(environ: Mapping[str, str] = os.environ) -> TrainerContext:
        """Read the environment, and the files that it names. Raises :class:`InputError` with the
        variable that is missing or invalid."""
        name_uncaught_errors()
        require_torch_version()

        def read_number(name: str, default: int | None = None) -> int:
            for key in (name, f"PET_{name}"):
                if key in environ:
                    try:
                        return int(environ[key])
                    except ValueError:
                        raise InputError(f"{key} is {environ[key]!r}; expected a number") from None
            if default is not None:
                return default
            raise InputError(f"{name} is not set; start the ranks with pipemorph run or torchrun")

        def read_variable(name: str) -> str | None:
            return environ.get(name) or environ.get(f"PET_{name}") or None

        job_file = environ.get("PIPEMORPH_JOB_FILE")
        secret_file = environ.get("PIPEMORPH_SECRET_FILE")
        token_file = environ.get("PIPEMORPH_TOKEN_FILE")
        trace_dir = environ.get("PIPEMORPH_TRACE_DIR")
        kept_dir = environ.get("PIPEMORPH_KEPT_DIR")
        progress_dir = environ.get("PIPEMORPH_PROGRESS_DIR")
        rank, world_size = read_number("RANK"), read_number("WORLD_SIZE")
        attempt = read_number("PIPEMORPH_ATTEMPT", read_number("TORCHELASTIC_RESTART_COUNT", 0))
        ingest_url = read_variable("PIPEMORPH_INGEST_URL")
        job = None
        if job_file:
            job = _read_job(job_file)
        elif ingest_url is not None:
            job = _parse_job(
                request_job(
                    ingest_url,
                    Path(token_file) if token_file else None,
                    environ.get("PIPEMORPH_CA_FILE"),
                    rank=rank,
                    world_size=world_size,
                    attempt=attempt,
                ),
                ingest_url,
            )
        args = environ.get("PIPEMORPH_ARGS")
        context = TrainerContext(
            rank=rank,
            world_size=world_size,
            local_rank=read_number("LOCAL_RANK", 0),
            local_world_size=read_number("LOCAL_WORLD_SIZE", 1),
            master_addr=read_variable("MASTER_ADDR") or "127.0.0.1",
            master_port=read_number("MASTER_PORT"),
            job=job,
            args=_parse_args(args) if args is not None else job.spec.trainer.args if job else {},
            namespace=environ.get(
                "PIPEMORPH_NAMESPACE", job.metadata.namespace if job else "default"
            ),
            attempt=attempt,
            secret=_read_secret(secret_file) if secret_file else b"",
            ingest_url=ingest_url,
            token_file=Path(token_file) if token_file else None,
            trace_dir=Path(trace_dir) if trace_dir else None,
            trace_bytes=read_number("PIPEMORPH_TRACE_BYTES", TRACE_BYTES),
            metrics_port=read_number("PIPEMORPH_METRICS_PORT", 0),
            memory_dir=Path(kept_dir) if kept_dir else None,
            place=read_number("PIPEMORPH_PLACE", rank),
            progress_dir=Path(progress_dir) if progress_dir else None,
            generation=read_number("PIPEMORPH_GENERATION", 0),
            run_name=_find_run_name(environ),
            places=environ.get("PIPEMORPH_PLACES"),
            layers=environ.get("PIPEMORPH_LAYERS"),
            grace_seconds=_parse_grace_seconds(environ.get("PIPEMORPH_GRACE_SECONDS")),
        )
        if context.trace_bytes < LEAST_TRACE_BYTES:
            raise InputError(
                f"PIPEMORPH_TRACE_BYTES is {context.trace_bytes}; expected at least"
                f" {LEAST_TRACE_BYTES} bytes"
            )
        if job is not None and job.spec.parallelism.world_size != world_size:
            want = job.spec.parallelism.mesh
            raise InputError(
                f"WORLD_SIZE is {world_size}; the job has {want} = {want.world_size} ranks"
            )
        return context

    def mesh_shape(
        self,
        stages: int | None = None,
        stages_per_rank: int | None = None,
        placement: StagePlacement | None = None,
    ) -> MeshShape:
        """Return the sizes and order of the job's mesh. Without a job file: ``stages`` (default: as
        many as fit on all ranks) × replicas, in the default order, with ``stages_per_rank``
        (default: 1).

        Raises :class:`InputError` if the stages cannot be divided over the ranks.
        """
        if self.job is not None:
            return self.job.spec.parallelism.mesh
        each = 1 if stages_per_rank is None else stages_per_rank
        if each < 1:
            raise InputError(f"stages_per_rank is {each}; expected at least 1")
        stages = self.world_size * each if stages is None else stages
        if stages % each:
            raise InputError(f"stages is {stages}; expected a multiple of stages_per_rank, {each}")
        ranks = stages // each
        if ranks < 1 or self.world_size % ranks:
            several = f" with {each} per rank" if each > 1 else ""
            raise InputError(
                f"{self.world_size} ranks cannot be cut into pipelines of {stages} stages{several};"
                f" start a multiple of {ranks} ranks"
            )
        return MeshShape(
            stages,
            self.world_size // ranks,
            stages_per_rank=each,
            placement=placement or "interleaved",
        )

    @property
    def iterations(self) -> int:
        """Iterations of the manifest; 0 without one."""
        return self.job.spec.trainer.iterations if self.job is not None else 0

    def read_layout(self, mesh: MeshShape) -> Layout:
        """Return the places of the ranks of ``mesh``. Raises :class:`InputError` if the launcher
        did not pass one place for each."""
        first = Layout.build_first(mesh)
        if self.job is not None:
            first = Layout.build_first(mesh, self.job.spec.parallelism.ranks_per_pod)
        return first if self.places is None else first.read_places(self.places)

    def read_layer_split(self, stages: int) -> tuple[int, ...]:
        """Return the number of layers of each stage; empty: divided evenly. Raises
        :class:`InputError` if the launcher did not pass one number for each."""
        return () if self.layers is None else Layout.read_layers(self.layers, stages)

    def coordinate(
        self,
        stages: int | None = None,
        stages_per_rank: int | None = None,
        placement: StagePlacement | None = None,
    ) -> Coordinate:
        """Return this rank's coordinate in :meth:`mesh_shape`. ``held_stages``: its stages."""
        return self.mesh_shape(stages, stages_per_rank, placement).find_coordinate(self.rank)


def _find_run_name(environ: Mapping[str, str]) -> str:
    """Return the name of all lives of a job's ranks; empty if no variable has it."""
    torchrun = environ.get("TORCHELASTIC_RUN_ID", "none")
    given = "" if torchrun == "none" else torchrun
    return environ.get("PIPEMORPH_RUN") or given or environ.get("SLURM_JOB_ID", "")


def _parse_grace_seconds(text: str | None) -> float:
    if text is None:
        return GRACE_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise InputError(f"PIPEMORPH_GRACE_SECONDS is {text!r}; expected seconds, at least 0")
    return seconds


def _read_job(file: str) -> PipeMorphJob:
    try:
        content = read_text(file, MAX_BYTES)
    except InputError as error:
        raise InputError(f"PIPEMORPH_JOB_FILE: {error}") from None
    return _parse_job(content, f"PIPEMORPH_JOB_FILE: {one_line(file)}")


def _parse_job(content: str, source: str) -> PipeMorphJob:
    try:
        return PipeMorphJob.model_validate_json(content)
    except ValidationError as error:
        raise InputError(f"{source}: {_explain_invalid_job(error)}") from None


def _explain_invalid_job(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return one_line(first["msg"]) if first["type"] == "json_invalid" else describe_job_error(error)


def _read_secret(file: str) -> bytes:
    try:
        secret = Path(file).read_bytes()
    except (OSError, ValueError) as error:
        # A ValueError is a zero byte in the name.
        reason = error.strerror if isinstance(error, OSError) else None
        raise InputError(
            f"PIPEMORPH_SECRET_FILE: {one_line(file)}: cannot be read: {reason or error}"
        ) from None
    if not secret:
        raise InputError(f"PIPEMORPH_SECRET_FILE: {one_line(file)}: is empty; expected a secret")
    return secret


def _parse_args(text: str) -> dict[str, Any]:
    try:
        args = json.loads(text)
    except (ValueError, RecursionError) as error:
        # A RecursionError is thousands of nested brackets.
        raise InputError(
            f"PIPEMORPH_ARGS is {one_line(text)!r}; expected a JSON object: {one_line(str(error))}"
        ) from None
    if not isinstance(args, dict):
        raise InputError(f"PIPEMORPH_ARGS is {one_line(text)!r}; expected a JSON object")
    return args


JOB_REQUEST_PATIENCE_SECONDS = 60.0
"""Seconds to try, as the host may start at the same time as the ranks."""
REQUEST_SECONDS = 10.0


def request_job(
    url: str,
    token_file: Path | None,
    authority: str | None,
    *,
    rank: int,
    world_size: int,
    attempt: int,
    patience: float = JOB_REQUEST_PATIENCE_SECONDS,
) -> str:
    """Request the PipeMorphJob as JSON. ``authority``: PEM file of the ingest's certificate
    authority; None: the system's.

    Waits for the host, which may start at the same time, and for the token file that it makes.
    Raises :class:`InputError` in one line that names what to set, if there is no token or no ingest
    at ``url`` for ``patience`` seconds, or if it refuses this rank.
    """
    base = validate_url(url, "PIPEMORPH_INGEST_URL")
    if token_file is None:
        raise InputError(
            "PIPEMORPH_TOKEN_FILE is not set; the ingest at PIPEMORPH_INGEST_URL needs the token"
        )
    client = HttpClient(base, token_file, authority)
    query = {"rank": str(rank), "world_size": str(world_size), "attempt": str(attempt)}

    def raise_if_untrusted(error: BaseException, _: float) -> None:
        if isinstance(error, NoResponseError) and error.untrusted:
            raise error

    try:
        answer = Retrying(**make_retry_options(seconds=patience, before=raise_if_untrusted))(
            client.request_blocking,
            "/v1/job",
            query=query,
            seconds=REQUEST_SECONDS,
            most_bytes=MAX_BYTES,
        )
        if answer.status != HTTPStatus.OK:
            raise InputError(_describe_refusal(url, answer))
        return answer.body.decode()
    except TokenUnreadableError as error:
        raise InputError(f"PIPEMORPH_TOKEN_FILE: {error}") from None
    except (NoResponseError, UnicodeDecodeError) as error:
        if isinstance(error, NoResponseError) and error.untrusted:
            raise InputError(
                f"PIPEMORPH_INGEST_URL {one_line(url)}: {error}; set PIPEMORPH_CA_FILE to the "
                "authority of its certificate"
            ) from None
        raise InputError(
            f"PIPEMORPH_INGEST_URL: no ingest answers at {one_line(url)} within {patience:.0f} s: "
            f"{one_line(str(error))}; start pipemorph serve there, or unset the variable to train "
            "without it"
        ) from None


def _describe_refusal(url: str, answer: HttpResponse) -> str:
    what = f"{one_line(url)} refuses this rank: {answer.reason}"
    if answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return f"{what}; PIPEMORPH_TOKEN_FILE must be the --token-file of pipemorph serve"
    if answer.status == HTTPStatus.NOT_FOUND:
        return f"{what}; this ingest hands out no job, so set PIPEMORPH_JOB_FILE"
    return what


# --- uncaught errors of a script that torchrun started --------------------------------------------
#
# torchrun's summary shows the content of each rank's error file, which only a function with
# `@record` writes. Otherwise the summary is empty, and the reason is in one of the tracebacks above
# it. `pipemorph serve` prints the first of them as its last line.

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable with the path of a rank's error file; torchrun and ``pipemorph serve`` set it."""


def name_uncaught_errors() -> None:
    """Write an uncaught error of a rank of torchrun to its error file. All ranks may have the same
    :class:`InputError`: rank 0 prints it in one line, without the trainer's own frames; the others
    leave it to the summary."""
    if ERROR_FILE in os.environ and not isinstance(sys.excepthook, _UncaughtErrorHook):
        sys.excepthook = _UncaughtErrorHook(sys.excepthook)


@dataclass(frozen=True)
class _UncaughtErrorHook:
    """Hook for uncaught errors. ``previous_hook``: the one replaced, as of a process group."""

    previous_hook: Callable[[type[BaseException], BaseException, TracebackType | None], object]

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        text, rank = f"{kind.__name__}: {error}", os.environ.get("RANK", "?")
        if not isinstance(error, InputError):
            self.previous_hook(kind, error, trace)
        elif rank == "0":
            print(text, file=sys.stderr)
        file = Path(os.environ[ERROR_FILE])
        if not isinstance(error, Exception) or (file.exists() and file.stat().st_size):
            return  # `@record` has written it, or another rank, without torchrun.
        extra = {"timestamp": str(int(time.time())), "rank": rank}
        content = json.dumps({"message": {"message": text, "extraInfo": extra}})
        try:
            file.write_text(content)
        except OSError as refused:
            print(f"torchrun's summary will not name this: {refused}", file=sys.stderr)
