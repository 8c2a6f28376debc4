"""Number of files that a reader has to open: to follow a report until it is a directive, and to
follow an iteration of a rank, or one F with its send."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from launch import run_ranks
from plant_support import Plant, settle, spec
from torch import nn

import pipemorph
import pipemorph_trainer
from pipemorph.control import JobController
from pipemorph.planning import OpKind
from pipemorph.protocol import LinkHealthReport
from pipemorph_trainer import Pipeline, TrainerContext
from pipemorph_trainer.executor.stage_executor import StageExecutor
from pipemorph_trainer.schedule import iteration as iteration_module

ROOT, TRAINER = Path(pipemorph.__file__).parent, Path(pipemorph_trainer.__file__).parent
MOST_FILES = 26
"""Files from a report to a directive: the spec, too: it says whether a job is only observed."""
OF_ITERATION = 40
"""Files of an iteration of a plain module under torchrun, on any stage."""
OF_F = 10, 40
"""Files and calls of an F and its send, on the first stage."""


@contextmanager
def noted(calls: list[str], *roots: Path) -> Iterator[None]:
    """Adds the file of each call of a function in ``roots``."""

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call":
            calls.extend(str(path.relative_to(root)) for root in roots if path.is_relative_to(root))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def test_a_report_becomes_a_directive_in_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walk in the host, without sockets: parse, observe, decide, plan, issue, encode."""
    taken, walk = JobController.process_report, set[str]()

    def report(self: JobController, sent: LinkHealthReport, now: float) -> Any:
        body, calls = sent.model_dump_json(), list[str]()
        with noted(calls, ROOT):
            answer = taken(self, LinkHealthReport.model_validate_json(body), now)
            settle(self, now)
            if (directive := self.get_directive()) is not None:
                directive.model_dump_json()
        if directive is not None and not walk:
            walk.update(calls)
        return answer

    monkeypatch.setattr(JobController, "process_report", report)
    plant = Plant(spec(4, 24))
    plant.run(6)
    plant.delays[1] = 0.040
    plant.run(6)
    assert {"control/controller.py", "control/decision.py", "planning/planner.py"} <= walk
    assert len(walk) <= MOST_FILES, sorted(walk)


def trace(context: TrainerContext) -> tuple[list[str], list[list[str]]]:
    """Calls of one iteration, and of each F of the next one, from its message to its send."""
    iteration, forwards, run_op = list[str](), list[list[str]](), StageExecutor.run_op

    def run(self: StageExecutor, kind: OpKind, microbatch: int) -> None:
        forwards.extend([[]] if kind is OpKind.F else [])
        with noted(forwards[-1] if kind is OpKind.F else [], ROOT, TRAINER):
            run_op(self, kind, microbatch)

    stage = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    x = torch.randn(8, 8)
    with Pipeline(stage, context=context, loss_fn=nn.functional.mse_loss, microbatches=4) as pipe:
        for _ in range(4):  # until everything is measured
            pipe.step(x, target=x)
        with noted(iteration, ROOT, TRAINER):
            pipe.step(x, target=x)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StageExecutor, "run_op", run)
            # Work that comes every 20 ms between two ops is no part of one.
            patch.setattr(iteration_module, "PLAN_POLL_SECONDS", 1e6)
            pipe.step(x, target=x)
    return iteration, forwards


def test_an_iteration_and_an_op_run_in_few_files() -> None:
    """Files of agents, replicas, faults and checkpoints are not entered without them."""
    ranks = run_ranks(3, trace)
    for iteration, _ in ranks:
        assert {"schedule/iteration.py", "backward/function_patches.py", "transport/poller.py"} <= {
            *iteration
        }
        assert len({*iteration}) <= OF_ITERATION, sorted({*iteration})
        idle = (
            "checkpoint/",
            "sync/",
            "control/",
            "detection/",
            "telemetry/trace",
            "telemetry/reporter",
            "transport/fault_injection",
        )
        assert not {file for file in iteration if file.startswith(idle)}
    files, calls = OF_F
    for forward in ranks[0][1]:
        assert {"executor/stage_executor.py", "transport/channels/direct.py"} <= {*forward}
        assert len({*forward}) <= files, sorted({*forward})
        assert len(forward) <= calls, forward
