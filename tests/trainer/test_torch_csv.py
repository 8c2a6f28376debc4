"""Schedules go to torch.distributed.pipelining and back as its compute-only CSV.

Held against torch's own parser, its own validation and its own lowering to sends and
receives, which executes the schedule; and against the orders torch makes itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from pipemorph.cli import main
from pipemorph.planning import Link, Policy, Problem, StageTimes, plan
from pipemorph.planning.formats.torch_csv import dump_csv, parse_csv
from pipemorph.planning.policies.interleaved import (
    one_f_one_b_interleaved,
    plan_interleaved,
    zero_bubble_v,
)
from pipemorph.planning.simulation.interleaved import (
    InterleavedSchedule,
    simulate_interleaved,
    validate_interleaved,
)

TEN = StageTimes(forward=10, backward_input=10, backward_weight=10)


class Stage(_PipelineStageBase):
    """As much of a stage as torch's schedules ask for before they run."""

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.submod = None  # type: ignore[assignment]
        self.stage_index = index
        self.num_stages = stages
        self.group_size = ranks
        self.group_rank = 0
        self.group = None
        self.stage_index_to_group_rank = {i: i % ranks for i in range(stages)}

    def _noop(self, *args: Any, **kwargs: Any) -> Any:
        return None

    _create_grad_recv_info = _prepare_forward_infra = _prepare_backward_infra = _noop  # type: ignore[assignment]


def torch_runtime(cls: Any, ranks: int, stages: int, microbatches: int) -> Any:
    mine = [Stage(index, stages, ranks) for index in range(0, stages, ranks)]
    return cls(mine, microbatches, loss_fn=lambda output, target: output)


def problem(stages: int, microbatches: int, delay: float = 0.0, **more: Any) -> Problem:
    """``delay`` on the first link."""
    links = tuple(Link(delay=0.0 if i else delay) for i in range(stages - 1))
    return Problem(microbatches=microbatches, stages=(TEN,) * stages, links=links, **more)


def own_rows(schedule: InterleavedSchedule) -> list[list[str]]:
    return [line.split(",") for line in dump_csv(schedule).splitlines()]


def torch_rows(runtime: Any) -> list[list[str]]:
    order = runtime.pipeline_order
    return [[str(action) for action in order[rank] if action] for rank in sorted(order)]


SINGLE = [
    (Policy.GPIPE, None),
    (Policy.ONE_F_ONE_B, None),
    (Policy.ZERO_BUBBLE, None),
    (Policy.PIPEMORPH, 20.0),
]


@pytest.mark.parametrize(("policy", "delay"), SINGLE)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 12), (5, 7)])
def test_torch_takes_our_schedules(
    policy: Policy, delay: float | None, stages: int, microbatches: int, tmp_path: Path
) -> None:
    schedule = plan(problem(stages, microbatches, delay=delay or 0.0), policy).schedule
    ours = InterleavedSchedule.of(schedule)
    file = tmp_path / "plan.csv"
    file.write_text(dump_csv(ours), newline="")
    runtime = torch_runtime(torch_schedules._PipelineScheduleRuntime, stages, stages, microbatches)
    # Parses, validates, adds sends and receives, and fails where they cannot be placed.
    runtime._load_csv(str(file))
    assert torch_rows(runtime) == own_rows(ours)
    back = tmp_path / "back.csv"
    runtime._dump_csv(str(back), format="compute_only")
    assert parse_csv(back.read_text()) == ours
    assert parse_csv(back.read_text()).single() == schedule


@pytest.mark.parametrize(
    ("ranks", "chunks", "microbatches"),
    [(2, 2, 4), (4, 2, 8), (4, 3, 12), (4, 2, 10), (4, 2, 3), (3, 1, 6), (1, 2, 3), (8, 4, 32)],
)
def test_interleaved_1f1b_is_torchs(
    ranks: int, chunks: int, microbatches: int, tmp_path: Path
) -> None:
    stages = ranks * chunks
    ours = one_f_one_b_interleaved(problem(stages, microbatches, ranks=ranks))
    theirs = torch_runtime(torch_schedules.ScheduleInterleaved1F1B, ranks, stages, microbatches)
    assert own_rows(ours) == torch_rows(theirs)
    assert ours.placement() == tuple(stage % ranks for stage in range(stages))
    validate_interleaved(ours)
    dumped = tmp_path / "torch.csv"
    theirs._dump_csv(str(dumped), format="compute_only")
    assert parse_csv(dumped.read_text()) == ours


@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(1, 1), (2, 2), (2, 8), (3, 6), (4, 2), (4, 8), (4, 16), (8, 32)]
)
def test_zero_bubble_v_is_torchs(ranks: int, microbatches: int, tmp_path: Path) -> None:
    stages = 2 * ranks
    ours = zero_bubble_v(problem(stages, microbatches))
    theirs = torch_runtime(torch_schedules.ScheduleZBVZeroBubble, ranks, stages, microbatches)
    assert own_rows(ours) == torch_rows(theirs)
    validate_interleaved(ours)
    dumped = tmp_path / "torch.csv"
    theirs._dump_csv(str(dumped), format="compute_only")
    assert parse_csv(dumped.read_text()) == ours


@pytest.mark.parametrize(
    "name", ["ScheduleInterleavedZeroBubble", "ScheduleDualPipeV", "ScheduleLoopedBFS"]
)
def test_torchs_other_schedules_can_be_read(name: str, tmp_path: Path) -> None:
    """Executed in their order; LoopedBFS runs backwards from the last microbatch, and is named."""
    theirs = torch_runtime(getattr(torch_schedules, name), 4, 8, 8)
    file = tmp_path / "torch.csv"
    if name == "ScheduleLoopedBFS":
        torch_schedules.PipelineScheduleMulti._dump_csv(theirs, str(file))
    else:
        theirs._dump_csv(str(file), format="compute_only")
    read = parse_csv(file.read_text())
    if name == "ScheduleLoopedBFS":
        with pytest.raises(Exception, match="found BW7; expected BW0"):
            validate_interleaved(read)
        return
    ran = simulate_interleaved(read, problem(8, 8))
    assert ran.makespan >= 2 * 8 * 30


def test_zero_bubble_v_has_no_bubble_but_the_fill() -> None:
    """Equal ops: each rank idles while it waits for its first op, and at most as long after."""
    found = plan_interleaved(problem(8, 16, policy="zero-bubble-v"))
    busy = 2 * 16 * 30
    assert found.simulation.makespan == busy + 3 * 10
    assert found.simulation.makespan == found.lower_bound


def test_through_the_command(tmp_path: Path, capsys: Any) -> None:
    """``plan --output csv`` → torch → ``simulate``."""
    source = tmp_path / "problem.json"
    source.write_text(problem(8, 8, ranks=4, delay=5.0).model_dump_json(exclude_none=True))
    csv = tmp_path / "plan.csv"
    for policy in ("1f1b-interleaved", "zero-bubble-v"):
        assert main(["plan", str(source), "--policy", policy, "--out", str(csv)]) == 0
        assert main(["plan", str(source), "--policy", policy, "--out", str(tmp_path / "p")]) == 0
        runtime = torch_runtime(torch_schedules._PipelineScheduleRuntime, 4, 8, 8)
        runtime._load_csv(str(csv))
        capsys.readouterr()
        assert main(["simulate", str(csv), str(source)]) == 0
        from_csv = capsys.readouterr().out
        assert '"policy": "imported"' in from_csv
        assert main(["simulate", str(tmp_path / "p"), str(source)]) == 0
        from_json = capsys.readouterr().out
        assert f'"policy": "{policy}"' in from_json
        cut = '"microbatches"'
        assert (
            from_csv.split(cut)[1].split('"planning_ms"')[0]
            == (from_json.split(cut)[1].split('"planning_ms"')[0])
        )
