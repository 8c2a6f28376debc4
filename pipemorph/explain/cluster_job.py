"""A PipeMorphJob with its status, as ``kubectl get -o json`` prints it, and the report of a run,
which is one with its history. What a later release has added is ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipemorph.api.sections.parallelism import Parallelism
from pipemorph.api.sections.template import gpus
from pipemorph.api.status import JobStatus
from pipemorph.errors import InputError, one_line
from pipemorph.explain.story import seconds_left
from pipemorph.wire import AdaptationRecord, IterationSample


class Lenient(BaseModel):
    """Takes what it knows of an object that a later release may have written."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class _Trainer(Lenient):
    iterations: int = 0


class _Adaptation(Lenient):
    enabled: bool = True


class SlowTime(Lenient):
    """A link was slow from iteration ``begin`` on, until it was not in ``end``; None: it is.
    ``delay``: the longest, seconds, which was that of ``column``."""

    link: int
    begin: int
    end: int | None = None
    delay: float
    column: int = 0


class Relayout(Lenient):
    """A change of the ranks' places and layers in a run. ``measured``: fraction of an iteration."""

    iteration: int | None = None
    measured: float | None = None
    layers: list[int] | None = None
    layers_before: list[int] | None = None


class _Links(Lenient):
    slow: list[SlowTime] = Field(default_factory=list)


class _Metadata(Lenient):
    name: str
    namespace: str = "default"


class _Spec(Lenient):
    parallelism: Parallelism
    trainer: _Trainer = Field(default_factory=_Trainer)
    adaptation: _Adaptation = Field(default_factory=_Adaptation)
    emulation: dict[str, Any] | None = None
    faults: list[dict[str, Any]] = Field(default_factory=list)
    template: Any = None


class ClusterJob(Lenient):
    """A job with what its status says, as far as an explanation needs them."""

    kind: str
    metadata: _Metadata
    spec: _Spec
    status: JobStatus | None = None
    iterations: list[IterationSample] | None = None
    """History of a run, with the following; None: the job is of a cluster."""
    adaptations: list[AdaptationRecord] = Field(default_factory=list)
    relayouts: list[Relayout] = Field(default_factory=list)
    links: _Links = Field(default_factory=_Links)
    kept: str = ""
    """Why the last decision in a run that goes on kept the plan; empty if it did not."""
    gpus: int = 0
    """GPUs of all its pods, as its template asks for them if it has one; 0 if it asks for none."""

    def model_post_init(self, context: Any) -> None:
        self.gpus = gpus(self.spec.template) * self.spec.parallelism.pods or self.gpus

    @property
    def is_over(self) -> bool:
        """Whether this is a run that has ended."""
        ends = ("Complete", "Failed", "Suspended")
        return self.iterations is not None and self.status is not None and self.status.state in ends

    @property
    def name(self) -> str:
        """``NAMESPACE/NAME``; ``NAME`` of a job that is on no cluster."""
        namespace, name = self.metadata.namespace, self.metadata.name
        return f"{namespace}/{name}" if namespace else name

    @property
    def done(self) -> float | None:
        """The fraction of its iterations that a job has done; None if status does not tell."""
        status, total = self.status, self.spec.trainer.iterations
        if status is None or status.training is None or not total:
            return None
        return 1.0 if status.state == "Complete" else min(1.0, status.training.iteration / total)

    @property
    def left_seconds(self) -> float | None:
        """Time that the remaining iterations of a running job will take, as the newest ones do;
        None if status does not tell."""
        status, total = self.status, self.spec.trainer.iterations
        if status is None or status.state != "Running" or status.training is None:
            return None
        training = status.training
        return seconds_left(total, training.iteration, training.iteration_seconds)


def read_job(content: Mapping[str, Any]) -> ClusterJob:
    """The job of an object. Raises :class:`InputError`, one line, if the object is none."""
    kind = content.get("kind")
    if kind is None and "iterations" in content:
        raise InputError(
            "kind: is missing, as in reports of earlier releases; expected a report with the job's"
            " status: run the job again, or read it with the release that wrote it"
        )
    if kind != "PipeMorphJob":
        raise InputError(one_line(f"kind: is {kind}; expected PipeMorphJob"))
    try:
        return ClusterJob.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        said = f"{where}: {first['msg']}; expected a PipeMorphJob, or a run's report"
        raise InputError(one_line(said)) from None
