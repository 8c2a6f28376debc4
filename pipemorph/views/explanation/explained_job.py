"""PipeMorphJob with its status, as ``kubectl get -o json`` prints it, and the report of a run, with
its history in addition. Fields of later releases are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipemorph.errors import InputError, one_line
from pipemorph.protocol import AdaptationRecord, IterationSample
from pipemorph.spec.job_status import JobStatus
from pipemorph.spec.sections.parallelism import Parallelism
from pipemorph.spec.sections.template import count_gpus
from pipemorph.views.explanation.explanation_text import estimate_seconds_remaining, join_few


class TolerantModel(BaseModel):
    """Model that ignores unknown fields: a later release may have written the object."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class _Trainer(TolerantModel):
    iterations: int = 0


class _Schedule(TolerantModel):
    policy: str = "pipemorph"
    dispatch: str = "auto"


class _Adaptation(TolerantModel):
    enabled: bool = True
    reorder: str = "bits"


class _MicrobatchWork(TolerantModel):
    reordering_gain: float | None = None


class SlowPeriod(TolerantModel):
    """Iterations in which a link was slow: ``begin`` up to but without ``end``; None: it still is.
    ``delay``: the longest, in seconds, and ``column``: the one that had it."""

    link: int
    begin: int
    end: int | None = None
    delay: float
    column: int = 0


class RunLayoutChange(TolerantModel):
    """Change of the ranks' places and layers in a run. ``measured``: saving as a fraction of an
    iteration."""

    iteration: int | None = None
    measured: float | None = None
    layers: list[int] | None = None
    layers_before: list[int] | None = None


class _LinkHistory(TolerantModel):
    slow: list[SlowPeriod] = Field(default_factory=list)


class _Adapting(TolerantModel):
    change: str
    promise: str = ""


class _Metadata(TolerantModel):
    name: str
    namespace: str = "default"


class _Spec(TolerantModel):
    parallelism: Parallelism
    trainer: _Trainer = Field(default_factory=_Trainer)
    adaptation: _Adaptation = Field(default_factory=_Adaptation)
    schedule: _Schedule = Field(default_factory=_Schedule)
    emulation: dict[str, Any] | None = None
    faults: list[dict[str, Any]] = Field(default_factory=list)
    template: Any = None


class ExplainedJob(TolerantModel):
    """Job with its status and history, as far as an explanation needs them."""

    kind: str
    metadata: _Metadata
    spec: _Spec
    status: JobStatus | None = None
    iterations: list[IterationSample] | None = None
    """Iterations of a run, part of its history like the next four fields; None: a cluster's job."""
    adaptations: list[AdaptationRecord] = Field(default_factory=list)
    relayouts: list[RunLayoutChange] = Field(default_factory=list)
    links: _LinkHistory = Field(default_factory=_LinkHistory)
    adapting: _Adapting | None = None
    """Prediction of what adapting would give an observed job."""
    work: _MicrobatchWork | None = None
    """Work of a run's microbatches; None: unknown, or not at the end of a run."""
    keep_reason: str = ""
    """Reason why the newest decision while a link was slow changed nothing; empty if it did."""
    gpus: int = 0
    """GPUs of all pods, by the job's template if it has one; 0 if it requests none."""

    def model_post_init(self, context: Any) -> None:
        self.gpus = count_gpus(self.spec.template) * self.spec.parallelism.pods or self.gpus

    @property
    def is_over(self) -> bool:
        """True for a run that has ended."""
        ends = ("Complete", "Failed", "Suspended")
        return self.iterations is not None and self.status is not None and self.status.state in ends

    @property
    def is_observed(self) -> bool:
        """True if PipeMorph observed the job, and did not run it."""
        return self.iterations is not None and not self.spec.trainer.iterations

    @property
    def name(self) -> str:
        """Name as ``NAMESPACE/NAME``, or ``NAME`` if the job is on no cluster."""
        namespace, name = self.metadata.namespace, self.metadata.name
        return f"{namespace}/{name}" if namespace else name

    @property
    def static_reason(self) -> str:
        """Reason why dispatch is static where ``auto`` could choose; empty if it can."""
        together, how = self.spec.parallelism.mesh.lockstep_dimensions, self.spec.schedule
        if not together or how.dispatch != "auto" or how.policy != "pipemorph":
            return ""
        return (
            f"static dispatch, since ranks along {join_few(together, 3)} share collectives in ops"
        )

    @property
    def fraction_done(self) -> float | None:
        """Fraction of the job's iterations that are done; None if status lacks it."""
        status, total = self.status, self.spec.trainer.iterations
        if status is None or status.training is None or not total:
            return None
        return 1.0 if status.state == "Complete" else min(1.0, status.training.iteration / total)

    @property
    def seconds_remaining(self) -> float | None:
        """Seconds that the remaining iterations of a running job take at the present pace; None if
        status lacks it."""
        status, total = self.status, self.spec.trainer.iterations
        if status is None or status.state != "Running" or status.training is None:
            return None
        training = status.training
        return estimate_seconds_remaining(total, training.iteration, training.iteration_seconds)


def parse_job_object(content: Mapping[str, Any]) -> ExplainedJob:
    """Parse the job from an object. Raises :class:`InputError`, one line, if it is none."""
    kind = content.get("kind")
    if kind is None and "iterations" in content:
        raise InputError(
            "kind: is missing, as in reports of earlier releases; expected a report with the job's"
            " status: run the job again, or read it with the release that wrote it"
        )
    if kind != "PipeMorphJob":
        raise InputError(one_line(f"kind: is {kind}; expected PipeMorphJob"))
    try:
        return ExplainedJob.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        message = f"{where}: {first['msg']}; expected a PipeMorphJob, or a run's report"
        raise InputError(one_line(message)) from None
