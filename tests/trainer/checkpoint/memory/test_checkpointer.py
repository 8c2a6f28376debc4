"""Ranks that come after a failure go on from copies of the ranks before them, to the bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from float32_gradients import in_float32, rounding
from gate import same_bits
from launch import Ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trainer_jobs import Loader

from pipemorph.local.processes.hang_detector import HangDetector
from pipemorph.spec.sections.recovery import FailurePolicy
from pipemorph.spec.sections.trainer import Checkpoint
from pipemorph_trainer import Options, Pipeline, TrainerContext
from pipemorph_trainer.agent.messages import NullControlClient, RankTelemetry
from pipemorph_trainer.checkpoint.memory.resume_point import ResumePoint, write_resume_report
from pipemorph_trainer.checkpoint.memory.state_copy import StateCopy
from pipemorph_trainer.topology.mesh import join_process_group
from pipemorph_trainer.topology.placement import to_local

pytestmark = [pytest.mark.timeout(300)]

WIDTH, N, UNTIL = 8, 4, 10


class Stage(nn.Module):
    """A stage with state besides parameters: a BatchNorm's statistics, and masks of dropout that
    depend on the random state of torch, Python and NumPy."""

    def __init__(self, index: int, drawn: float) -> None:
        super().__init__()
        self.drawn = drawn
        torch.manual_seed(100 + index)
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        at("forward")
        hidden = nn.functional.dropout(torch.tanh(self.norm(self.up(x))), self.drawn)
        noise = self.drawn * (random.random() + np.random.rand())
        out: Tensor = x + self.down(hidden) * (1 + noise)
        if out.requires_grad:
            out.register_hook(lambda _: at("backward"))
        return out


MOMENTS = (
    "drawn", "forward", "backward", "stepped", "clipped", "in the optimizer", "optimized", "copying"
)  # fmt: skip
killed: list[Any] = [None, 0]
"""Moment and iteration at which this rank is killed; the present iteration."""


def at(moment: str) -> None:
    if killed[0] == (moment, killed[1]):
        os.kill(os.getpid(), signal.SIGKILL)


class Halves(torch.optim.AdamW):
    """Steps in two parts, between which a rank may be killed."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        whole = self.param_groups
        for group in whole:
            self.param_groups = [group]
            super().step()
            at("in the optimizer")
        self.param_groups = whole


class Reports(NullControlClient):
    """Writes the finished iterations that rank 0 publishes to a file. ``deaf``: as an agent that
    ends before it has reported."""

    def __init__(self, path: Path, deaf: bool) -> None:
        self._path, self.acknowledges = path, deaf

    def publish(self, telemetry: RankTelemetry) -> None:
        report = telemetry.report
        finished = report.finished_iteration if report is not None else None
        if finished is not None and not self.acknowledges:
            with self._path.open("a") as out:
                out.write(f"{finished.index} {finished.loss}\n")


@dataclass(frozen=True)
class Case:
    """``mesh``: its sizes by dimension. ``accumulate``: steps of an accumulation. ``drawn``: random
    numbers are drawn. ``every``, ``neighbour``: the pipeline's ``snapshot_iterations`` and
    ``neighbour``. ``low``: in bfloat16, with gradients in float32. ``deaf``: generations whose
    reports are lost."""

    mesh: dict[str, int] = field(default_factory=lambda: {"pp": 2, "dp_replicate": 2})
    per_rank: int = 1
    accumulate: int = 1
    drawn: bool = True
    every: int = 1
    neighbour: bool | None = None
    low: bool = False
    deaf: int = 0

    @property
    def ranks(self) -> int:
        found = 1
        for size in self.mesh.values():
            found *= size
        return found


def train(
    context: TrainerContext,
    case: Case,
    kill: dict[int, tuple[str, int]],
    checkpoints: str | None = None,
) -> dict[str, Any]:
    """Train; ``kill``: the moment and iteration at which a rank is killed."""
    killed[0] = kill.get(context.rank)
    join_process_group(context, torch.device("cpu"))
    mesh = init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))

    def build(part: Any) -> nn.Module:
        module = Stage(part.stage, 0.2 if case.drawn else 0.0)
        if case.low:
            in_float32(module)
        if "dp_shard" in case.mesh:
            names = tuple(n for n in ("dp_replicate", "dp_shard") if n in case.mesh)
            fully_shard(module, mesh=mesh[names])
        return module

    write = StateCopy.write_tensors

    def in_halves(self: StateCopy, values: Any) -> None:
        write(self, dict(list(values.items())[: len(values) // 2]))
        at("copying")
        write(self, values)

    StateCopy.write_tensors = in_halves  # type: ignore[method-assign]

    def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
        parameters = list(module.parameters())
        groups = [{"params": parameters[:3]}, {"params": parameters[3:]}]
        made["optimizer"] = Halves(groups, lr=0.05)
        if case.low:
            rounding(made["optimizer"])
        made["scheduler"] = torch.optim.lr_scheduler.StepLR(made["optimizer"], 1, gamma=0.8)
        return made["optimizer"]

    class Scheduler:
        """The scheduler, which the builder has not made yet."""

        def state_dict(self) -> Any:
            return made["scheduler"].state_dict()

        def load_state_dict(self, state: Any) -> None:
            made["scheduler"].load_state_dict(state)

    made: dict[str, Any] = {}
    loader, losses = Loader(2 * N, WIDTH), []
    torch.manual_seed(context.rank)
    random.seed(context.rank)
    np.random.seed(context.rank)
    checkpoint = None
    if checkpoints is not None:
        checkpoint = Checkpoint(directory=checkpoints, every=2, keep=9)
    with Pipeline(
        build, context=context, mesh=mesh, stages_per_rank=case.per_rank, microbatches=N,
        loss_fn=nn.functional.mse_loss, optimizer=optimizer_of, checkpoint=checkpoint,
        state={"scheduler": Scheduler(), "data": loader}, deadline_seconds=60,
        options=Options(
            snapshot_iterations=case.every, neighbour=case.neighbour,
            control=None if context.memory_dir is None else Reports(
                context.memory_dir / "reports", context.generation < case.deaf
            ),
        ),
    ) as pipe:  # fmt: skip
        batches = iter(loader)
        for iteration in range(pipe.start_iteration, UNTIL):
            x = next(batches) + case.drawn * torch.rand(2 * N, WIDTH)
            x = x.bfloat16() if case.low else x
            killed[1] = iteration
            at("drawn")
            last = (iteration + 1) % case.accumulate == 0
            if last:
                losses.append(float(pipe.step(x, target=x.flip(1))))
            else:
                with pipe.no_sync():
                    losses.append(float(pipe.step(x, target=x.flip(1))))
            at("stepped")
            if not last:
                continue
            pipe.clip_grad_norm_(1.0)
            at("clipped")
            made["optimizer"].step()
            made["optimizer"].zero_grad()
            at("optimized")
            made["scheduler"].step()
            killed[1] += 1
        killed[1] = -1
    state = {
        f"{stage}.{name}": to_local(value).clone()
        for stage, module in pipe.modules.items()
        for name, value in (*module.named_parameters(), *module.named_buffers())
    }
    return {"start": pipe.start_iteration, "losses": losses, "state": state}


def same(mine: dict[str, Any], whole: dict[str, Any]) -> None:
    """Check that a rank's losses and state are those of an undisturbed run."""
    assert mine["losses"] == whole["losses"][mine["start"] :]
    assert list(mine["state"]) == list(whole["state"])
    for name, value in mine["state"].items():
        same_bits(value, whole["state"][name], name)


Kill = tuple[int, str, int]
"""Rank, moment and iteration."""


def survive(
    case: Case,
    kills: list[Kill],
    folder: Path,
    checkpoints: str | None = None,
    lose: Callable[[int, Path], None] = lambda generation, folder: None,
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Run generations, each with a rank that is killed, and a last one. ``lose`` is called after
    each with the folder. Returns the results of the ranks of the last one, and the resume point of
    every generation after the first."""
    folder.mkdir()
    words: list[dict[str, Any]] = []

    def read(generation: int) -> None:
        """Read the report of a generation, which replaces those before."""
        (path,) = folder.glob("resumed.*")
        assert path.name == f"resumed.generation-{generation}"
        words.append(json.loads(path.read_text()))

    for generation, (rank, moment, iteration) in enumerate(kills):
        context = {"memory_dir": folder, "generation": generation, "run_name": "all"}
        ended = Ranks(
            case.ranks, train, case, {rank: (moment, iteration)}, checkpoints, context=context
        ).wait()
        assert ended[rank].exitcode == -signal.SIGKILL, (kills[generation], ended[rank])
        if generation:
            read(generation)
        lose(generation, folder)
    context = {"memory_dir": folder, "generation": len(kills), "run_name": "all"}
    found = run_ranks(case.ranks, train, case, {}, checkpoints, context=context)
    read(len(kills))
    return found, words


def test_a_word_is_in_place_of_the_last_one(tmp_path: Path) -> None:
    """The folder is memory, and generations may be many."""
    (tmp_path / "rank-0.generation-0").mkdir()
    for generation in range(3):
        write_resume_report(tmp_path, generation, ResumePoint(generation, "kept"))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["rank-0.generation-0", "resumed.generation-2"]


def reported(folder: Path, whole: list[Any]) -> None:
    """Check that no iteration is missing, and all have their losses."""
    lines = [line.split() for line in (folder / "reports").read_text().splitlines()]
    assert {int(index) for index, _ in lines} == set(range(UNTIL))
    for index, loss in lines:
        assert float(torch.tensor(float(loss))) == whole[0]["losses"][int(index)]


@pytest.mark.parametrize(
    ("kills", "in_memory"),
    [
        ([(1, "backward", 3), (0, "optimized", 5)], True),
        pytest.param([(0, "backward", 5)], False, marks=pytest.mark.full),
        pytest.param(
            [(0, "forward", 3), (1, "drawn", 5), (0, "stepped", 7)], True, marks=pytest.mark.full
        ),
        pytest.param([(1, "stepped", 3), (0, "backward", 7)], False, marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_what_the_host_never_acknowledged_is_reported_by_the_next_ranks(
    kills: list[Any], in_memory: bool, tmp_path: Path
) -> None:
    """Iterations before a checkpoint, of which no copy is in memory, are reported, too."""
    case, memory = Case({"pp": 2}, drawn=False, deaf=len(kills)), tmp_path / "memory"
    whole = run_ranks(case.ranks, train, case, {})
    lost = (lambda *_: None) if in_memory else lose(0, 1)
    survive(case, kills, memory, str(tmp_path / "checkpoints"), lose=lost)
    reported(memory, whole)


def lose(*ranks: int) -> Callable[[int, Path], None]:
    """Removes the copies of these ranks, as the end of their machine does."""

    def files(_: int, folder: Path) -> None:
        for rank in ranks:
            (path,) = folder.glob(f"rank-{rank}.generation-*")
            shutil.rmtree(path)

    return files


def compare(found: list[Any], whole: list[Any], started: int) -> None:
    for mine, undisturbed in zip(found, whole, strict=True):
        assert mine["start"] == started
        same(mine, undisturbed)


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param(
            ("backward", "in the optimizer", "copying"), marks=pytest.mark.full, id="some"
        ),
        pytest.param(MOMENTS, marks=pytest.mark.soak, id="all"),
    ],
)
def test_a_rank_is_killed_at_any_moment(moments: Sequence[str], tmp_path: Path) -> None:
    """Kill a rank at one moment in each generation, each time another one. All go on with the
    newest iteration that all have begun, and no rank has ended."""
    case = Case()
    whole = run_ranks(case.ranks, train, case, {})
    kills = [(number % 4, moment, number) for number, moment in enumerate(moments)]
    found, words = survive(case, kills, tmp_path / "memory")
    for (rank, moment, iteration), word in zip(kills, words, strict=True):
        assert word["rung"] == "kept"
        # Killed before it had begun the iteration, or in it.
        begun = iteration - (moment in ("drawn", "copying"))
        assert word["iteration"] == max(0, begun), (rank, moment, word)
    compare(found, whole, words[-1]["iteration"])
    reported(tmp_path / "memory", whole)


@pytest.mark.parametrize(
    ("case", "kills"),
    [
        pytest.param(
            Case(accumulate=3), [(3, "stepped", 4), (0, "backward", 5), (2, "drawn", 6)],
            marks=pytest.mark.full, id="accumulation",
        ),
        pytest.param(
            Case(accumulate=3, low=True), [(3, "stepped", 4), (0, "backward", 5)],
            marks=pytest.mark.full, id="accumulation in float32",
        ),
        pytest.param(
            Case({"pp": 2}, per_rank=2), [(1, "backward", 2), (0, "optimized", 4)],
            id="several stages",
        ),
        pytest.param(
            Case({"pp": 2, "dp_shard": 2}), [(1, "backward", 2), (2, "in the optimizer", 4)],
            marks=pytest.mark.full, id="sharded",
        ),
    ],
)  # fmt: skip
def test_kinds_of_jobs(case: Case, kills: list[Kill], tmp_path: Path) -> None:
    whole = run_ranks(case.ranks, train, case, {})
    found, words = survive(case, kills, tmp_path / "memory")
    assert [word["rung"] for word in words] == ["kept"] * len(kills)
    for (_, _, iteration), word in zip(kills, words, strict=True):
        assert word["iteration"] in (iteration - 1, iteration), words
    compare(found, whole, words[-1]["iteration"])


@pytest.mark.parametrize(
    "mesh",
    [
        {"pp": 2, "dp_replicate": 2},
        pytest.param({"dp_replicate": 2, "dp_shard": 2}, marks=pytest.mark.full),
    ],
)
def test_a_rank_without_memory_takes_that_of_its_replica(
    mesh: dict[str, int], tmp_path: Path
) -> None:
    case = Case(mesh if "pp" in mesh else {"pp": 1, **mesh}, drawn=False)
    whole = run_ranks(case.ranks, train, case, {})
    found, (word,) = survive(case, [(1, "backward", 3)], tmp_path / "memory", lose=lose(0, 3))
    assert (word["rung"], word["iteration"]) == ("replica", 3)
    assert "rank 0, 3 had no copy" in word["why"]
    compare(found, whole, 3)


def spoil(*names: str) -> Callable[[int, Path], None]:
    """Changes a byte of these copies."""

    def flip(_: int, folder: Path) -> None:
        for path in (each for name in names for each in folder.glob(name)):
            copy = StateCopy.open(path)
            copy.view_tensor_bytes()[5] += 1

    return flip


@pytest.mark.parametrize(
    ("mesh", "names", "rung"),
    [
        ({"pp": 2, "dp_replicate": 2}, ["rank-3.*/[ab]"], "replica"),
        pytest.param({"pp": 2}, ["rank-1.*/[ab]"], "checkpoint", marks=pytest.mark.full),
        pytest.param({"pp": 2}, ["rank-0.*/a", "rank-1.*/a"], "kept", marks=pytest.mark.full),
        pytest.param({"pp": 2}, ["rank-0.*/b", "rank-1.*/b"], "kept", marks=pytest.mark.full),
    ],
)
def test_a_damaged_copy_is_named_and_not_used(
    mesh: dict[str, int], names: list[str], rung: str, tmp_path: Path
) -> None:
    case = Case(mesh, drawn=False)
    whole = run_ranks(case.ranks, train, case, {})
    found, (word,) = survive(
        case, [(1, "backward", 5)], tmp_path / "memory", str(tmp_path / "checkpoints"),
        lose=spoil(*names),
    )  # fmt: skip
    assert word["rung"] == rung and "is damaged" in word["why"], word
    compare(found, whole, word["iteration"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("every", "kills", "wanted", "why"),
    [
        # Iterations since the last copy run again, at most as many as lie between two copies.
        (4, [(1, "backward", 6), (0, "optimized", 7), (1, "drawn", 8)], ("kept", 4), ""),
        (
            8, [(1, "backward", 7)], ("checkpoint", 6),
            "the newest copy that all ranks have is of iteration 0",
        ),
        (0, [(1, "backward", 3)], ("beginning", 0), "ranks copy no state in memory"),
    ],
    ids=["every fourth", "older than the checkpoint", "none"],
)  # fmt: skip
def test_copies_of_few_iterations(
    every: int, kills: list[Kill], wanted: tuple[str, int], why: str, tmp_path: Path
) -> None:
    saves = wanted[0] == "checkpoint"
    # The random state of Python and NumPy is not in checkpoints.
    case = Case({"pp": 2}, every=every, drawn=not saves)
    whole = run_ranks(case.ranks, train, case, {})
    folder = str(tmp_path / "checkpoints") if saves else None
    found, words = survive(case, kills, tmp_path / "memory", folder)
    for word in words:
        assert (word["rung"], word["iteration"]) == wanted, word
        assert not why or word["why"] == why
    assert bool(list((tmp_path / "memory").glob("rank-*"))) is (every > 0)
    compare(found, whole, wanted[1])


@pytest.mark.full
def test_a_lost_shard_without_a_replica_comes_from_the_checkpoint(tmp_path: Path) -> None:
    # The random state of Python and NumPy is not in checkpoints.
    case, folder = Case({"pp": 2, "dp_shard": 2}, drawn=False), str(tmp_path / "checkpoints")
    whole = run_ranks(case.ranks, train, case, {})
    found, words = survive(
        case, [(1, "backward", 5), (0, "drawn", 5)], tmp_path / "memory", folder,
        lose=lambda generation, memory: lose(2)(generation, memory) if generation == 0 else None,
    )  # fmt: skip
    assert [(word["rung"], word["iteration"]) for word in words] == [("checkpoint", 4), ("kept", 4)]
    assert words[0]["why"] == "no rank has the state of rank 2 before iteration 5"
    compare(found, whole, 4)


WHY = "Pipeline was given no optimizer"


def refused(context: TrainerContext) -> str:
    module = nn.Linear(WIDTH, WIDTH)
    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=N
    ) as pipe:  # fmt: skip
        x = torch.ones(N, WIDTH)
        pipe.step(x, target=x)
    assert not list(context.memory_dir.glob("rank-*/[ab]"))
    assert context.progress_dir is not None
    watch = HangDetector(FailurePolicy(), 1)
    watch.start_generation(HangDetector.list_progress_files(context.progress_dir, [0]))
    assert watch.read_notes() == [f"{pipe.coordinate} keeps no copy of its state in memory: {WHY}"]
    assert watch.read_notes() == []
    return ""


def test_state_that_cannot_be_copied_is_reported(tmp_path: Path) -> None:
    (result,) = Ranks(
        1, refused, context={"memory_dir": tmp_path / "memory", "progress_dir": tmp_path}
    ).wait()
    assert result.exitcode == 0, result.error
    assert f"keeps no copy of its state in memory: {WHY}" in result.output
