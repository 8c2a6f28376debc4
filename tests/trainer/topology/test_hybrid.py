"""Stages that are distributed over several ranks train as the whole model does on one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hybrid_models import LENGTH, Reference, batch_of, distribute, loss_fn, part_of, whole_model
from launch import run_ranks
from several_jobs import make_plan as make_several
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from trainer_jobs import Job, make_plan

from pipemorph.errors import InputError
from pipemorph.planning import Plan, Route
from pipemorph.planning.ir import StagePlacement
from pipemorph.spec.sections.trainer import Checkpoint
from pipemorph_trainer import Options, Pipeline, TrainerContext
from pipemorph_trainer.errors import BatchError
from pipemorph_trainer.topology import hierarchy
from pipemorph_trainer.topology.mesh import join_process_group, read_mesh_shape
from pipemorph_trainer.topology.placement import is_dtensor

N, ROWS, ITERATIONS, LR, CLIP = 4, 8, 3, 0.1, 0.5
RANKS = 8
TIED = [("embedding.weight", 0), ("head.weight", -1)]
SHARED = {"head.weight": "embedding.weight"}
CLOSE = {"rtol": 1e-11, "atol": 1e-13}
"""Tolerance of float64: the order of sums differs where they run over several ranks."""


@dataclass(frozen=True)
class Case:
    """Sizes of the mesh by dimension, in its order. ``delegated``: the second plan's route."""

    mesh: dict[str, int]
    delegated: bool = False
    resume: str = ""
    save: str = ""
    hybrid: bool = True
    """True if FSDP has the replicas in its mesh, False if the pipeline averages over them."""
    exact: bool = False
    """True if gradients have the reference's bits: means of two ranks, and whole products."""
    recomputes: bool = False
    """True if the second plan runs forwards again."""
    each: int = 1
    """Stages per rank."""
    placement: StagePlacement = "interleaved"
    tied: bool = False
    """True if the output layer's weight is that of the embedding."""
    frees: bool = False
    """True if FSDP frees parameters after each use."""

    @property
    def stages(self) -> int:
        return self.mesh["pp"] * self.each

    def plan(self, version: int) -> Plan:
        """The first plan, or the second one."""
        route = Route.DELEGATED if version and self.delegated else Route.DIRECT
        routes = (route,) * (self.stages - 1)
        if self.each > 1:
            return make_several(
                "pipemorph", self.mesh["pp"], self.stages, N,
                placement=self.placement, version=version, delay=3.0 * version, routes=routes,
            )  # fmt: skip
        job = Job(self.stages, N)
        if not version:
            return make_plan(job, 0, "zero-bubble")
        if not self.recomputes:
            return make_plan(job, version, "1f1b", routes=routes)
        made = make_plan(job, version, "zero-bubble", routes=routes, device_limit=2)
        return replace(made, recompute=(True,) * self.stages)


CASES = {
    "pp2 tp2 dp2": Case({"dp_replicate": 2, "pp": 2, "tp": 2}, delegated=True, tied=True, save="a"),
    "pp4 fsdp2": Case({"pp": 4, "dp_shard": 2}, save="b", exact=True, recomputes=True, frees=True),
    "pp2 hsdp2x2": Case(
        {"pp": 2, "dp_replicate": 2, "dp_shard": 2}, delegated=True, tied=True, resume="a"
    ),
    "pp2 fsdp2 dp2": Case({"dp_replicate": 2, "pp": 2, "dp_shard": 2}, hybrid=False),
    "pp2 cp2 tp2": Case({"pp": 2, "cp": 2, "tp": 2}, delegated=True, resume="b", recomputes=True),
    "pp2x2 fsdp2 tp2": Case(
        {"pp": 2, "dp_shard": 2, "tp": 2}, each=2, delegated=True, tied=True, save="c"
    ),
    "pp2v2 hsdp2x2": Case(
        {"pp": 2, "dp_replicate": 2, "dp_shard": 2}, each=2, placement="v", delegated=True,
        tied=True, resume="c", frees=True,
    ),
}  # fmt: skip
IN_ROUNDS = "pp2 fsdp2 dp2"
SAVES_TIED = "pp2x2 fsdp2 tp2"
MORE_CASES = {
    SAVES_TIED: CASES[SAVES_TIED],
    "pp2 fsdp4": Case({"pp": 2, "dp_shard": 4}, delegated=True),
    "pp2v2 fsdp2 dp2": Case(
        {"dp_replicate": 2, "pp": 2, "dp_shard": 2}, each=2, placement="v", hybrid=False
    ),
    "pp2v2 tp2 dp2": Case(
        {"dp_replicate": 2, "pp": 2, "tp": 2}, each=2, placement="v", tied=True, resume="c"
    ),
    "pp2x2 cp2 tp2": Case({"pp": 2, "cp": 2, "tp": 2}, each=2, tied=True, resume="c"),
    "pp4 fsdp2": Case({"pp": 4, "dp_shard": 2}, tied=True, resume="c"),
    "pp2 fsdp2 tp2": Case({"pp": 2, "dp_shard": 2, "tp": 2}, tied=True, resume="c"),
}


REFUSALS = (
    "parameter '0.weight' of the stage is distributed over ranks of other stages; use a mesh of",
    "mesh has the dimensions pp, dp; expected pp, dp_replicate, dp_shard, cp, tp",
    "Pipeline was given stages=4, and its mesh has 2 stages × 2 replicas × 2 tensor; leave",
    "tied weights differ: 'embedding.weight' of stage 0 is float64[11, 8], Shard(dim=1) over tp; "
    "'head.weight' of stage 1 is float64[11, 8], Shard(dim=0) over tp; give both",
    "plan 0 has dispatch guided; ranks of one stage that run collectives inside ops",
    "plan 1 has dispatch guided; ranks of one stage that run collectives inside ops",
    "step() of iteration 0 is refused on all ranks: rank 1 (stage 0, replica 0, tensor 1): input 0",
)


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if is_dtensor(value) else value  # type: ignore[attr-defined, no-any-return]


def cut(batch: tuple[Tensor, Tensor], index: int, parts: int) -> list[Tensor]:
    """The part of the sequence of a context-parallel rank."""
    each = LENGTH // parts
    return [t[:, index * each : (index + 1) * each].contiguous() for t in batch]


def train(context: TrainerContext, name: str, case: Case, folder: str) -> str:
    """Train a case, and compare each iteration with the reference. Returns the stages' splits."""
    join_process_group(context, torch.device("cpu"))
    mesh = init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))
    place = {dim: mesh.get_local_rank(dim) for dim in case.mesh}
    size = case.mesh.get
    stages = case.stages
    shards = size("dp_shard", 1)
    data = place.get("dp_replicate", 0) * shards + place.get("dp_shard", 0)
    whole = whole_model(tied=case.tied)
    coordinate = read_mesh_shape(mesh, RANKS, case.each, case.placement).find_coordinate(
        context.rank
    )
    parts = {
        stage: distribute(
            part_of(whole, stage, stages),
            mesh,
            hybrid=case.hybrid,
            reshard=(True, True) if case.frees else (None, None),
        )
        for stage in coordinate.held_stages
    }
    named = [(f"{s}.", n, p) for s, part in parts.items() for n, p in part.named_parameters()]
    if place.get("dp_replicate"):
        # The pipeline begins with the weights of the first replica, also where they are sharded.
        for *_, parameter in named:
            parameter.data.add_(1.0)
    optimizer = torch.optim.SGD([p for *_, p in named], lr=LR, momentum=0.9)
    reference = Reference(N, ROWS, LR, tied=case.tied)
    where = f"{folder}/{case.resume or case.save}"
    checkpoint = None
    if case.save or case.resume:
        # A run that resumes saves nothing that another one would resume from.
        every = ITERATIONS if case.save else 1000
        checkpoint = Checkpoint(directory=where, every=every, resume=bool(case.resume))
    options: Any = {"stages_per_rank": case.each, "placement": case.placement}
    with Pipeline(
        [*parts.values()], context=context, mesh=mesh, loss_fn=loss_fn, optimizer=optimizer,
        plan=case.plan(0), checkpoint=checkpoint, deadline_seconds=60,
        recompute="auto" if case.recomputes else None, tied=TIED if case.tied else None,
        **options if case.each > 1 else {},
    ) as pipe:  # fmt: skip
        assert (pipe.is_first, pipe.is_last) == (0 in parts, stages - 1 in parts)
        assert pipe.start_iteration == (ITERATIONS if case.resume else 0)
        for iteration in range(pipe.start_iteration):
            # Steps of the run that saved, which had as many ranks with data of their own.
            reference.step(iteration, 2, CLIP)
        for iteration in range(pipe.start_iteration, pipe.start_iteration + ITERATIONS):
            if iteration == pipe.start_iteration:
                pipe.install_plan(case.plan(1))
            batch = batch_of(iteration, data, ROWS)
            tokens, target = cut(batch, place.get("cp", 0), size("cp", 1))
            loss = pipe.step(tokens, target=target)
            wanted, norm, grads = reference.step(iteration, size("dp_replicate", 1) * shards, CLIP)
            torch.testing.assert_close(
                float(loss), wanted, rtol=1e-6, atol=0,
                msg=lambda m, i=iteration: f"{name}, loss of iteration {i}: {m}",
            )  # fmt: skip
            for stage, key, parameter in named:
                assert parameter.grad is not None, key
                what = f"{name}, iteration {iteration}: {stage}{key}"
                close = {"rtol": 0, "atol": 0} if case.exact else CLOSE
                torch.testing.assert_close(
                    full(parameter.grad), grads[SHARED.get(key, key) if case.tied else key],
                    msg=lambda m, w=what: f"{w}: {m}", **close,
                )  # fmt: skip
            torch.testing.assert_close(float(pipe.clip_grad_norm_(CLIP)), norm, rtol=1e-6, atol=0)
            optimizer.step()
            optimizer.zero_grad()
        assert pipe.plan.version == 1
        (split,) = {*pipe.splits.values()}
    trained = dict(reference.model.named_parameters(remove_duplicate=False))
    for _, key, parameter in named:
        torch.testing.assert_close(full(parameter), trained[key])
    if case.tied and case.save:
        saved = FileSystemReader(f"{where}/iteration-{ITERATIONS:08d}").read_metadata()
        names = [name for name in saved.state_dict_metadata if name.startswith("model.")]
        assert names.count("model.embedding.weight") == 1
        assert "model.head.weight" not in names, names
    return split


def refusals(context: TrainerContext) -> list[str]:
    """Collect the errors of what cannot be trained. A batch that does not fit on one rank of a
    stage is refused before its ranks wait for each other; the next step runs."""
    cpu = torch.device("cpu")
    join_process_group(context, cpu)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp_replicate", "tp"))
    errors = []

    def refused(part: nn.Module, **options: Any) -> None:
        with pytest.raises(InputError) as error:
            Pipeline(part, context=context, loss_fn=loss_fn, microbatches=N, **options)
        errors.append(str(error.value))

    part = part_of(whole_model(), mesh.get_local_rank("pp"), 2)
    everyone = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
    spread = nn.Sequential(nn.Linear(8, 8))
    parallelize_module(spread, everyone, {"0": ColwiseParallel()})
    refused(spread, mesh=mesh)
    refused(part, mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp")))
    refused(part, mesh=mesh, stages=4)
    apart = part_of(whole_model(tied=True), mesh.get_local_rank("pp"), 2)
    # Splits by columns of the embedding, and by words of the head.
    kind = {"embedding": ColwiseParallel(), "head": ColwiseParallel()}
    parallelize_module(apart, mesh["tp"], {k: v for k, v in kind.items() if hasattr(apart, k)})
    refused(apart, mesh=mesh, tied=TIED)
    refused(part, mesh=mesh, options=Options(dispatch="guided"))
    with Pipeline(
        distribute(part, mesh), context=context, mesh=mesh, loss_fn=loss_fn, microbatches=N,
        deadline_seconds=60,
    ) as pipe:  # fmt: skip
        guided = make_plan(Job(2, N), 1, "pipemorph", dispatch="guided")
        with pytest.raises(InputError) as error:
            pipe.install_plan(guided)
        errors.append(str(error.value))
        for rows in (ROWS - 1, ROWS):
            tokens, target = batch_of(0, mesh.get_local_rank("dp_replicate"), ROWS)
            # The other tensor rank of the stage has a batch that fits.
            tokens = tokens[:rows] if context.rank == 1 else tokens
            try:
                pipe.step(tokens, target=target)
            except BatchError as refusal:
                assert rows < ROWS
                errors.append(str(refusal))
        assert pipe.iteration == 1
        assert all(parameter.grad is not None for parameter in part.parameters())
    return errors


def more_cases(context: TrainerContext, cases: dict[str, Case], folder: str) -> dict[str, str]:
    return {name: train(context, name, case, folder) for name, case in cases.items()}


def every_case(context: TrainerContext, folder: str) -> tuple[dict[str, str], list[str]]:
    # Norms and losses go through more than one group, as among many ranks.
    with patch.object(hierarchy, "WIDEST", 4):
        found = more_cases(context, {IN_ROUNDS: CASES[IN_ROUNDS]}, folder)
    rest = {name: case for name, case in CASES.items() if name != IN_ROUNDS}
    return found | more_cases(context, rest, folder), refusals(context)


@pytest.mark.full
@pytest.mark.needs_engine
@pytest.mark.timeout(320)
def test_every_mesh_trains_as_one_process(tmp_path: Path) -> None:
    """Losses, gradients and norms, with one and with two stages per rank, and with tied weights;
    across a plan change, a delegated link and a resume on another mesh."""
    results = run_ranks(RANKS, every_case, str(tmp_path), timeout=300.0)
    for name in CASES:
        assert {result[0][name] for result in results} == {"deferred"}, name
    for _, errors in results:
        for line, words in zip(errors, REFUSALS, strict=True):
            assert words in line, errors
            assert "\n" not in line


@pytest.mark.soak
@pytest.mark.needs_engine
@pytest.mark.timeout(400)
def test_more_meshes_train_as_one_process(tmp_path: Path) -> None:
    """Other meshes with two stages per rank or tied weights, which resume on each other."""
    results = run_ranks(RANKS, more_cases, MORE_CASES, str(tmp_path), timeout=380.0)
    assert all({*result.values()} == {"deferred"} for result in results), results
