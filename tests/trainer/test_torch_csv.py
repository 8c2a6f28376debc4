"""Schedules go to torch.distributed.pipelining and back as its compute-only CSV.

Held against torch's own parser, its own validation and its own lowering to sends and
receives, which executes the schedule; and against the orders torch makes itself.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from schedule_text import schedule_of
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from pipemorph.cli import main
from pipemorph.planning import Link, Policy, Problem, Schedule, StageTimes, plan, simulate, validate
from pipemorph.planning.formats.torch_csv import dump_communication_csv, dump_csv, parse_csv
from pipemorph.planning.rule_based import schedule_1f1b_interleaved, schedule_zero_bubble_v
from pipemorph_trainer import TrainerContext

TEN = StageTimes(forward=10, backward_input=10, backward_weight=10)


class Stage(_PipelineStageBase):
    """Part of a stage that torch's schedules request before they run."""

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


def own_rows(schedule: Schedule) -> list[list[str]]:
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
    ours = plan(problem(stages, microbatches, delay=delay or 0.0), policy).schedule
    file = tmp_path / "plan.csv"
    file.write_text(dump_csv(ours), newline="")
    runtime = torch_runtime(torch_schedules._PipelineScheduleRuntime, stages, stages, microbatches)
    # Parses, validates, adds sends and receives, and fails where they cannot be placed.
    runtime._load_csv(str(file))
    assert torch_rows(runtime) == own_rows(ours)
    back = tmp_path / "back.csv"
    runtime._dump_csv(str(back), format="compute_only")
    assert parse_csv(back.read_text()) == ours


INTERLEAVED = [
    (2, 2, 4), (4, 2, 8), (4, 3, 12), (4, 2, 10), (4, 2, 3), (3, 1, 6), (1, 2, 3), (8, 4, 32),
]  # fmt: skip
IN_A_V = [(1, 1), (2, 2), (2, 8), (3, 6), (4, 2), (4, 8), (4, 16), (8, 32)]


@pytest.mark.parametrize(
    ("placement", "ranks", "chunks", "microbatches"),
    [
        *(("interleaved", *case) for case in INTERLEAVED),
        *(("v", ranks, 2, microbatches) for ranks, microbatches in IN_A_V),
    ],
)
def test_rules_are_those_of_torch(
    placement: str, ranks: int, chunks: int, microbatches: int, tmp_path: Path
) -> None:
    stages = ranks * chunks
    if placement == "v":
        kind, ours = (
            torch_schedules.ScheduleZBVZeroBubble,
            schedule_zero_bubble_v(problem(stages, microbatches)),
        )
    else:
        kind = torch_schedules.ScheduleInterleaved1F1B
        ours = schedule_1f1b_interleaved(problem(stages, microbatches, ranks=ranks))
        assert ours.placement == tuple(stage % ranks for stage in range(stages))
    theirs = torch_runtime(kind, ranks, stages, microbatches)
    assert own_rows(ours) == torch_rows(theirs)
    validate(ours)
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
            validate(read)
        return
    ran = simulate(read, problem(8, 8))
    assert ran.makespan >= 2 * 8 * 30


def test_zero_bubble_v_has_no_bubble_but_the_fill() -> None:
    """Equal ops: each rank idles while it waits for its first op, and at most as long after."""
    found = plan(problem(8, 16, policy="zero-bubble-v"))
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


# --- with sends and receives ------------------------------------------------------------------


def lowered(runtime: Any) -> dict[int, list[str]]:
    """The actions that torch would run, per rank."""
    return {r: list(map(str, row)) for r, row in runtime.pipeline_order_with_comms.items()}


def messages(row: list[str], placement: tuple[int, ...], peer: int) -> list[str]:
    """Messages between a rank and another one, in order: as the sender names it."""
    found = []
    for action in row:
        if match := re.fullmatch(r"(\d+)(SEND|RECV)_([FB])(\d+)", action):
            stage, way = int(match.group(1)), 1 if match.group(3) == "F" else -1
            sends = match.group(2) == "SEND"
            if placement[stage + (way if sends else -way)] == peer:
                found.append(f"{stage if sends else stage - way}{match.group(3)}{match.group(4)}")
    return found


COMMS = [
    *((policy, 4, 4, 6, delay) for policy, delay in SINGLE),
    (Policy.PIPEMORPH, 8, 8, 24, 60.0),
    (Policy.ONE_F_ONE_B_INTERLEAVED, 4, 8, 8, 15.0),
    (Policy.ZERO_BUBBLE_V, 4, 8, 8, 15.0),
    (Policy.ZERO_BUBBLE_V, 1, 2, 3, None),
]


@pytest.mark.parametrize("case", COMMS, ids=str)
def test_torch_takes_our_sends_and_receives(
    case: tuple[Policy, int, int, int, float | None], tmp_path: Path
) -> None:
    """Actions of torch's own lowering, in an order that it can run, too."""
    policy, ranks, stages, microbatches, delay = case
    source, plain, whole = (tmp_path / name for name in ("problem.json", "a.csv", "b.csv"))
    given = problem(stages, microbatches, ranks=ranks, delay=delay or 0.0)
    source.write_text(given.model_dump_json(exclude_none=True))
    command = ["plan", str(source), "--policy", policy.value]
    assert main([*command, "--out", str(plain)]) == 0
    assert main([*command, "--output", "csv-comms", "--out", str(whole)]) == 0
    theirs, ours = (
        torch_runtime(torch_schedules._PipelineScheduleRuntime, ranks, stages, microbatches)
        for _ in range(2)
    )
    theirs._load_csv(str(plain))
    ours._load_csv(str(whole), format="compute_comms")
    mine, its = lowered(ours), lowered(theirs)
    placement = parse_csv(plain.read_text()).placement
    compute = re.compile(r"\d+[FIWB]\d+")
    for rank, row in mine.items():
        assert sorted(row) == sorted(its[rank])
        assert list(filter(compute.fullmatch, row)) == list(filter(compute.fullmatch, its[rank]))
        for peer in range(ranks):
            between = messages(row, placement, peer)
            assert between == messages(mine[peer], placement, rank), (rank, peer)
    # Fails where ranks would wait for each other. Actions of FSDP are unknown to it.
    for rank, actions in ours.pipeline_order_with_comms.items():
        known = [each for each in actions if each.microbatch_index is not None]
        ours.pipeline_order_with_comms[rank] = known
    ours._simulate()


def test_receives_are_where_their_messages_are_sent_in_the_plan() -> None:
    """Stage 0 takes 30 a forward and stage 1 takes 10: its own forwards are over long before the
    next message is sent. And where no op takes any time, a receive is still before its op."""
    ops = schedule_of(2, ["F0 F1 BW0 BW1", "F0 BW0 F1 BW1"])
    rows = dump_communication_csv(ops, [[30, 60, 90, 120], [40, 50, 70, 80]]).splitlines()
    last = "1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1RESHARD,1WAIT_SEND_B0,1WAIT_SEND_B1"
    assert rows[1] == (f"1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,{last}")
    assert rows[0].startswith("0UNSHARD,0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0RECV_B1,0B0,")
    at_once = dump_communication_csv(ops, [[0] * 4] * 2).splitlines()
    for row in at_once:
        cells = row.split(",")
        for i, cell in enumerate(cells):
            if match := re.fullmatch(r"(\d)RECV_([FB])(\d)", cell):
                stage, what, microbatch = match.groups()
                assert cells.index(f"{stage}{what}{microbatch}") > i


def run_in_torch(context: TrainerContext, folder: str, per_edge: bool) -> list[list[str]]:
    """Run both files of a plan, and one of several stages per rank, on three ranks: the hashes of
    the gradients, per file."""
    dist.init_process_group("gloo", rank=context.rank, world_size=3,
        init_method=f"tcp://{context.master_addr}:{context.master_port}")  # fmt: skip
    # Set as by TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P, which is read before a rank is forked.
    config: Any = torch.distributed.config
    config.pipeline_per_edge_p2p = per_edge
    found: list[list[str]] = []
    for policy, stages in (("pipemorph", 3), ("zero-bubble-v", 6)):
        indices = [context.rank, *([5 - context.rank] if stages == 6 else [])]
        found.append([])
        for file, form in ((f"{policy}.csv", "compute_only"), (f"{policy}.comms", "compute_comms")):
            modules = []
            for index in indices:
                torch.manual_seed(index)
                modules.append(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
            runtime: Any = torch_schedules._PipelineScheduleRuntime(
                [PipelineStage(module, index, stages, torch.device("cpu"))
                 for module, index in zip(modules, indices, strict=True)],
                6, loss_fn=nn.functional.mse_loss,
            )  # fmt: skip
            runtime._load_csv(f"{folder}/{file}", format=form)
            x = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
            for _ in range(2):
                last = stages - 1 in indices
                runtime.step(*([x] if 0 in indices else []), target=x if last else None)
            assert runtime._stages[0].p2p_per_edge == per_edge
            grads = [p.grad for module in modules for p in module.parameters()]
            digest = hashlib.sha256(b"".join(g.numpy().tobytes() for g in grads if g is not None))
            found[-1].append(f"{len(grads)} {digest.hexdigest()}")
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("per_edge", [pytest.param(False, marks=pytest.mark.full), True])
def test_torch_runs_our_sends_and_receives(per_edge: bool, tmp_path: Path) -> None:
    """The gradients of the plan whose sends and receives torch places."""
    for policy, stages in (("pipemorph", 3), ("zero-bubble-v", 6)):
        source = tmp_path / "problem.json"
        given = problem(stages, 6, delay=25.0, ranks=3)
        source.write_text(given.model_dump_json(exclude_none=True))
        command = ["plan", str(source), "--policy", policy, "--out"]
        assert main([*command, str(tmp_path / f"{policy}.csv")]) == 0
        assert main([*command, str(tmp_path / f"{policy}.comms"), "--output", "csv-comms"]) == 0
    for rank in run_ranks(3, run_in_torch, str(tmp_path), per_edge, timeout=100.0):
        for theirs, ours in rank:
            assert ours == theirs
