"""Sharded stages whose parameters are freed after each use, by the setting of ``fully_shard``."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hybrid_models import batch_of, distribute, loss_fn, part_of, whole_model
from launch import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from trainer_jobs import Job, make_plan

from pipemorph_trainer import Pipeline, TrainerContext
from pipemorph_trainer.executor.sharded_modules import ReshardingPolicy
from pipemorph_trainer.topology.mesh import join_process_group

STAGES, SHARDS, N, ROWS, ITERATIONS = 2, 2, 4, 8, 3
Reshard = tuple[bool | int | None, bool | int | None]
GATHERED: Reshard = (None, None)
BLOCKS: Reshard = (True, None)
ALL: Reshard = (True, True)
SPLITS = ("auto", "fused")


class Ran(NamedTuple):
    """Results. ``between``, ``within``: most bytes of gathered parameters between ops, and while a
    layer runs, in the last iteration. ``blocks``: bytes of each layer, ``whole``: of the
    stage. ``late``: parameters whose gradients W computed."""

    grads: list[list[Tensor]]
    losses: list[float]
    split: str
    between: int
    within: int
    whole: int
    blocks: list[int]
    late: int


class Gathered:
    """Counts the memory of gathered parameters, which is that of the tensors that layers used."""

    def __init__(self, part: Any) -> None:
        self.seen: dict[int, nn.Parameter] = {}
        self.between, self.most = 0, 0
        self.groups = [
            group
            for module in part.modules()
            if isinstance(module, FSDPModule)
            for group in module._get_fsdp_state()._fsdp_param_groups
        ]
        for layer in part.layers.values():
            layer.up.register_forward_pre_hook(lambda *_, each=layer: self._see(each.parameters()))
        for name in ("embedding", "head"):
            if hasattr(part, name):
                module = getattr(part, name)
                module.register_forward_pre_hook(lambda m, _: self._see(m.parameters()))

    def _see(self, parameters: Any) -> None:
        self.seen.update((id(p), p) for p in parameters)
        self.most = max(self.most, self.held())

    def held(self) -> int:
        return sum(p.untyped_storage().nbytes() for p in self.seen.values())

    def watch(self, runner: Any) -> None:
        for name in ("run_forward", "backward_input", "backward_weight", "run_fused_backward"):
            op = getattr(runner, name)

            def ran(*args: Any, op: Any = op, **kwargs: Any) -> Any:
                found = op(*args, **kwargs)
                self.between = max(self.between, self.held())
                assert all(group._all_gather_result is None for group in self.groups), "on its way"
                return found

            setattr(runner, name, ran)


def again(layer: Any, args: Any, out: Tensor) -> Tensor:
    """Use a weight outside its Linear, too, and one whose gradient needs the value of another."""
    twice = nn.functional.linear(args[0], layer.up.weight)[..., : out.shape[-1]]
    return out + twice + nn.functional.linear(args[0], layer.mixing * layer.scale)


def train(
    context: TrainerContext,
    mesh: Any,
    reshard: Reshard,
    *,
    twice: bool = False,
    compiled: bool = False,
    **options: Any,
) -> Ran:
    """``twice``: each layer also uses weights as in :func:`again`."""
    stage = mesh.get_local_rank("pp")
    part = part_of(whole_model(), stage, STAGES)
    for layer in part.layers.values() if twice else ():
        torch.manual_seed(3)
        for name in ("mixing", "scale"):
            layer.register_parameter(name, nn.Parameter(torch.randn_like(layer.q.weight)))
        layer.register_forward_hook(again)
    for layer in part.layers.values() if compiled else ():
        layer.compile(backend="pipemorph_aot_eager")
    part = distribute(part, mesh, reshard=reshard)
    blocks = [sum(p.nbytes for p in layer.parameters()) for layer in part.layers.values()]
    whole = sum(p.nbytes for p in part.parameters())
    gathered = Gathered(part)
    grads, losses = [], []
    with Pipeline(
        part, context=context, mesh=mesh, loss_fn=loss_fn, deadline_seconds=60,
        plan=make_plan(Job(STAGES, N), 0, "zero-bubble"), **options,
    ) as pipe:  # fmt: skip
        (own,) = pipe._parts.stages.values()
        gathered.watch(own.runner)
        for iteration in range(ITERATIONS):
            gathered.between = gathered.most = 0
            tokens, target = batch_of(iteration, mesh.get_local_rank("dp_shard"), ROWS)
            losses.append(float(pipe.step(tokens, target=target)))
            grads.append([p.grad.to_local().clone() for p in part.parameters()])  # type: ignore[union-attr]
            part.zero_grad()
            # Only shards are held.
            assert gathered.held() == 0
        losses.append(float(pipe.evaluate(tokens, target=target)))
        split = pipe.split
        late = len(own.runner.build_report().deferred)
    return Ran(grads, losses, split, gathered.between, gathered.most, whole, blocks, late)


def every_way(context: TrainerContext) -> dict[str, Ran]:
    join_process_group(context, torch.device("cpu"))
    mesh = init_device_mesh("cpu", (STAGES, SHARDS), mesh_dim_names=("pp", "dp_shard"))
    return {
        "gathered": train(context, mesh, GATHERED),
        "compiled": train(context, mesh, ALL, compiled=True),
        "blocks": train(context, mesh, BLOCKS),
        "all": train(context, mesh, ALL),
        "fused": train(context, mesh, ALL, split="fused"),
        **{
            f"twice, {split}, {how}": train(context, mesh, reshard, twice=True, split=split)
            for split in SPLITS
            for how, reshard in (("gathered", GATHERED), ("all", ALL))
        },
    }


def same_bits(name: str, ran: Ran, wanted: Ran) -> None:
    assert ran.losses == wanted.losses, name
    for mine, theirs in zip(ran.grads, wanted.grads, strict=True):
        assert all(map(torch.equal, mine, theirs)), name


@pytest.mark.full
@pytest.mark.timeout(180)
def test_parameters_are_freed_by_setting_and_gradients_keep_their_bits() -> None:
    for found in run_ranks(STAGES * SHARDS, every_way, timeout=160.0):
        for split in SPLITS:
            ran, wanted = (found.pop(f"twice, {split}, {how}") for how in ("all", "gathered"))
            same_bits(split, ran, wanted)
        gathered, compiled = found["gathered"], found.pop("compiled")
        same_bits("compiled", compiled, gathered)
        assert compiled.between == 0
        assert compiled.late >= 2 * 6, "the Linears of two blocks"
        # Parts of a vocabulary of 11 are as large as those of 12.
        assert gathered.between >= gathered.whole, "the script did not ask for anything else"
        rest = gathered.between - sum(gathered.blocks)
        for name, ran in found.items():
            same_bits(name, ran, gathered)
        assert [found[name].split for name in ("gathered", "blocks", "all", "fused")] == [
            "deferred", "deferred", "deferred", "fused",
        ]  # fmt: skip
        assert found["blocks"].between == rest
        assert found["blocks"].within == rest + max(gathered.blocks)
        for name in ("all", "fused"):
            assert found[name].between == 0, name
            assert found[name].within == rest + max(gathered.blocks), name


def freed(context: TrainerContext) -> dict[str, int]:
    """Number of modules that are freed after each use, by what they are sharded over."""
    join_process_group(context, torch.device("cpu"))
    found = {}
    for names in (("dp_shard",), ("dp_replicate",), ("dp_replicate", "dp_shard")):
        mesh = init_device_mesh("cpu", (2,) if len(names) == 1 else (1, 2), mesh_dim_names=names)
        module: Any = fully_shard(nn.Linear(4, 4), mesh=mesh, reshard_after_forward=True)
        found["x".join(names)] = len(ReshardingPolicy([module]).freed)
    dist.barrier()  # gloo cannot finish a group with a rank that has ended.
    return found


def test_what_is_sharded_over_replicas_stays_gathered() -> None:
    """Replicas may run ops in different orders, in which no collective may be."""
    expected = {"dp_shard": 1, "dp_replicate": 0, "dp_replicatexdp_shard": 1}
    assert run_ranks(2, freed) == [expected] * 2
