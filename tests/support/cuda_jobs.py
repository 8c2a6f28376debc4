"""The jobs of ``trainer_jobs.py`` with their stages on a GPU, and what was seen while they ran.

Every rank takes the GPU of its local rank, or shares one where there are fewer: the delegated route
does not mind, NCCL does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import several_jobs
import torch
import trainer_jobs as jobs
from trainer_jobs import Job, Record

from pipemorph_trainer import Pipeline, TrainerContext

ENVIRON = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@dataclass
class Seen:
    """``synchronised``: what torch said of host waits in a step after the first."""

    record: Record
    synchronised: list[str] = field(default_factory=list)


def _on_gpu(context: TrainerContext) -> None:
    os.environ.update(ENVIRON)
    device = torch.device("cuda", context.local_rank % torch.cuda.device_count())
    # The trainer does not choose the kernels of a stage. The embedding's adds atomically.
    torch.use_deterministic_algorithms(True)
    make_stage, make_batch = jobs.make_stage, jobs.make_batch
    for module in (jobs, several_jobs):
        vars(module)["make_stage"] = lambda *args: make_stage(*args).to(device)
        vars(module)["make_batch"] = lambda *args: tuple(t.to(device) for t in make_batch(*args))


def _to_host(record: Record) -> Record:
    record.grads = [{n: g.cpu() for n, g in grads.items()} for grads in record.grads]
    record.parameters = {n: p.cpu() for n, p in record.parameters.items()}
    return record


def train_on_gpu(context: TrainerContext, job: Job, strict: bool = False) -> Seen:
    """``strict``: a host wait in any step after the first is an error, which torch raises where
    it happens."""
    _on_gpu(context)
    step = Pipeline.step

    def stepping(self: Pipeline, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error" if strict and self.iteration else "default")
        try:
            return step(self, *args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    Pipeline.step = stepping  # type: ignore[method-assign]
    return Seen(_to_host(jobs.train(context, job)))


def several_on_gpu(
    context: TrainerContext, job: Job, *args: Any
) -> dict[int, tuple[Record, list[str]]]:
    """:func:`several_jobs.train` on a GPU."""
    _on_gpu(context)
    found = several_jobs.train(context, job, *args)
    return {stage: (_to_host(record), order) for stage, (record, order) in found.items()}


def several_sequential_on_gpu(context: TrainerContext, job: Job) -> list[Record]:
    """:func:`several_jobs.sequential` on a GPU."""
    _on_gpu(context)
    return [_to_host(record) for record in several_jobs.sequential(job)]


def reference_on_gpu(context: TrainerContext, job: Job) -> list[Record]:
    _on_gpu(context)
    return [_to_host(record) for record in jobs.reference(job)]
