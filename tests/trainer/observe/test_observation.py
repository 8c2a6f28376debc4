"""Parts of an observation alone: modules that are imported later, marks of a device."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from observed_pipelines import read_rows

from pipemorph.diagnose.operation import BACKWARD, FORWARD, WEIGHT
from pipemorph_trainer.observe.device_marks import ANCHOR_READS, DeviceMarks
from pipemorph_trainer.observe.import_hooks import call_after_import
from pipemorph_trainer.observe.observation import Observation, TimedCall
from pipemorph_trainer.observe.observed_rank import ObservedRank
from pipemorph_trainer.observe.torch_pipelines import ScheduleHooks, hook_schedules


def test_a_module_is_hooked_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_later.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders, found = list(sys.meta_path), list[int]()
    call_after_import("imported_later", lambda: found.append(1))
    call_after_import("json", lambda: found.append(2))
    assert found == [2], "json is imported already"
    importlib.import_module("imported_later")
    assert found == [2, 1]
    assert sys.meta_path == finders
    module = sys.modules.pop("imported_later")
    assert module.VALUE == 1
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__


class FakeEvent:
    """An event of a device whose clock is ``now`` milliseconds, by the rules of torch.cuda.Event:
    its time counts from another event, once it has passed."""

    now = 0.0
    synchronized = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at = -1.0
        self.passed = False

    def record(self, stream: object) -> None:
        assert stream == "stream of cuda:1"
        self.at = FakeEvent.now

    def synchronize(self) -> None:
        FakeEvent.synchronized += 1
        self.passed = True

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.passed and other.passed
        return other.at - self.at


def test_marks_of_a_device_are_read_as_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(Event=FakeEvent, current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr("pipemorph_trainer.observe.device_marks.time", lambda: 1000.0)
    marks = DeviceMarks("cuda:1")
    early = marks.record()
    FakeEvent.now = 500.0
    read = marks.read_times()
    FakeEvent.now = 750.0
    late = marks.record()
    # The anchor was recorded at 500 ms of the device, which are 1000 s here.
    assert (read(early), read(late)) == (999.5, 1000.25)
    # The anchor is renewed now and then, since both clocks drift.
    monkeypatch.setattr("pipemorph_trainer.observe.device_marks.time", lambda: 1000.3)
    for _ in range(ANCHOR_READS - 1):
        assert marks.read_times()(late) == 1000.25
    assert marks.read_times()(late) == pytest.approx(1000.3)


def test_data_of_evaluations_are_no_data_of_a_step(tmp_path: Path) -> None:
    observation = Observation(tmp_path, 0)
    observation.set_place(ObservedRank(0, 0, 0, (0,)))
    loaded = TimedCall(1.0, 2.0, None, (), {})

    def train(*, evaluations: int) -> None:
        for _ in range(evaluations):
            observation.add_loading(loaded)
            observation.omit_call(lambda: None)
        observation.add_loading(loaded)
        observation.begin_call(4, 0)
        observation.begin_optimizer()
        observation.end_optimizer()

    for evaluations in (0, 3, 1):
        train(evaluations=evaluations)
    observation.stop()
    rows = (tmp_path / "rank0.jsonl").read_text().splitlines()
    assert [sum(f'"step": {step},' in row for row in rows) for step in range(3)] == [2, 2, 2]


def test_a_forked_child_records_nothing(tmp_path: Path) -> None:
    observation = Observation(tmp_path, 0)
    observation.hook_process()
    observation.set_place(ObservedRank(0, 0, 0, (0,)))
    observation.add_loading(TimedCall(1.0, 2.0, None, (), {}))
    child = os.fork()
    if not child:
        observation.stop()
        os._exit(observation.active)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not (tmp_path / "rank0.jsonl").read_text()
    observation.stop()
    assert (tmp_path / "rank0.jsonl").read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("builder", "expected"), [(None, [BACKWARD]), (object(), [BACKWARD, WEIGHT])]
)
def test_stage_zero_has_two_parts_if_it_builds_its_weight_backward(
    tmp_path: Path, builder: object, expected: list[str]
) -> None:
    observation = Observation(tmp_path, 0)
    hooks = ScheduleHooks(observation)
    observation.set_place(ObservedRank(0, 0, 0, (0,)))
    observation.begin_call(1, 0)
    stage = SimpleNamespace(is_first=True, stage_index=0, dw_builder=builder)
    call = TimedCall(1.0, 2.0, None, (stage, 0), {"full_backward": False})
    hooks.add_backward(call)
    hooks.add_weight(call)
    observation.stop()
    rows = read_rows(tmp_path)
    assert [row["optype"] for row in rows] == expected


def make_schedules(*lacks: str) -> Any:
    """Module like torch's ``schedules``, without some of the functions that are hooked."""

    class Schedule:
        def step(self) -> None: ...
        def _maybe_compute_loss(self) -> None: ...

    class Stage:
        def forward_one_chunk(self, fwd_chunk_id: int) -> None: ...
        def backward_one_chunk(self, bwd_chunk_id: int) -> None: ...
        def backward_weight_one_chunk(self, bwd_chunk_id: int) -> None: ...

    for owner in (Schedule, Stage):
        for name in lacks:
            if hasattr(owner, name):
                delattr(owner, name)
    functions: dict[str, Any] = {
        "_batch_p2p": lambda ops: [],
        "_wait_batch_p2p": lambda works: None,
    }
    return SimpleNamespace(
        PipelineScheduleSingle=Schedule, PipelineScheduleMulti=type("Multi", (Schedule,), {}),
        _PipelineSchedule=Schedule, _PipelineStageBase=Stage,
        **{name: call for name, call in functions.items() if name not in lacks},
    )  # fmt: skip


@pytest.mark.parametrize(
    "lacks",
    [("_wait_batch_p2p",), ("_maybe_compute_loss", "_batch_p2p"), ("backward_weight_one_chunk",)],
)
def test_removed_functions_are_named_and_the_rest_is_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lacks: tuple[str, ...]
) -> None:
    observation = Observation(tmp_path, 0)
    observation.set_place(ObservedRank(0, 0, 0, (0,)))
    schedules = make_schedules(*lacks)
    hook_schedules(observation, schedules)
    assert observation.active
    (line,) = caplog.messages
    assert line == f"torch.distributed.pipelining has no {', '.join(lacks)}: not recorded"
    stage = schedules._PipelineStageBase()
    stage.stage_index = 0
    observation.begin_call(1, 0)
    stage.forward_one_chunk(0)
    observation.stop()
    assert [row["optype"] for row in read_rows(tmp_path)] == [FORWARD]
