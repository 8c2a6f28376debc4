"""torchtitan's own trainer, configured as in ``examples/torchtitan``, on ranks of :mod:`launch`."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import trainer_jobs

from pipemorph.planning import Plan
from pipemorph.planning.ir import StagePlacement
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer import Options, TrainerContext
from pipemorph_trainer.agent.messages import NullControlClient
from pipemorph_trainer.agent.rank_plan import RankPlan

STEPS = 4
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/torchtitan/train.py"


@dataclass(frozen=True)
class TitanJob:
    """``adaptive``: with our ``pipelining_fn``; else torchtitan's 1F1B."""

    adaptive: bool
    pipeline: int = 2
    replicate: int = 1
    """Replicas; above 1, with ``shard``: hybrid-sharded data parallel."""
    shard: int = 1
    tensor: int = 1
    chunked_loss: bool = False
    recompute: str = ""
    schedule: str = "1F1B"
    """Schedule by torchtitan's name; one for several stages gives each rank two."""
    placement: StagePlacement = "interleaved"
    """Placement of several stages per rank, as the schedule has them."""
    plan: Plan | None = None
    """A plan that arrives while it trains."""


@dataclass
class TitanRun:
    """Results of a rank: exact losses and norms, a hash of its final parameters; of an adaptive run
    also its last plan's version and the parameters that W computed."""

    seen: list[tuple[int, float, float]]
    parameters: str
    plan: int = 0
    deferred: frozenset[str] = frozenset()


class Arriving(NullControlClient):
    """A control client whose plan is there from the beginning."""

    def __init__(self, plan: RankPlan | None) -> None:
        self._plan = plan

    def pop_newest_plan(self) -> RankPlan | None:
        plan, self._plan = self._plan, None
        return plan


def train(context: TrainerContext, job: TitanJob) -> TitanRun:
    """Train for some steps on one rank."""
    os.environ.update(
        RANK=str(context.rank), WORLD_SIZE=str(context.world_size), LOCAL_RANK=str(context.rank),
        MASTER_ADDR=context.master_addr, MASTER_PORT=str(context.master_port),
    )  # fmt: skip
    # torchtitan's mesh has the stages outermost.
    place = context.rank * job.pipeline // context.world_size
    mine = None
    if job.plan is not None:
        stages = job.plan.schedule.stage_count
        mesh = MeshShape(stages, stages_per_rank=stages // job.pipeline, placement=job.placement)
        mine = trainer_jobs.part(job.plan, place, mesh)
    config, seen = configure(job, mine)
    trainer = config.build()
    trainer.train()
    digest = hashlib.sha256()
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            digest.update(name.encode() + parameter.to_local().detach().numpy().tobytes())
    run = TitanRun(seen, digest.hexdigest())
    if job.adaptive:
        schedule = trainer.pp_schedule
        run.plan = schedule.pipeline.plan.version
        found = (stage.dw_builder.deferred for stage in schedule._stages)
        run.deferred = frozenset().union(*found)
        schedule.close()
    trainer.close()
    return run


def load_example() -> Any:
    spec = spec_from_file_location("torchtitan_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def configure(job: TitanJob, plan: RankPlan | None) -> tuple[Any, list[tuple[int, float, float]]]:
    """torchtitan's config, and the list that gets what it logs. ``plan``: arrives on this rank."""
    example = load_example()
    example.run_on_cpu()  # before torchtitan's modules are imported
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.distributed.pipeline_parallel import pipeline_llm

    config = example.make_config(STEPS)
    seen: list[tuple[int, float, float]] = []
    own_log = MetricsProcessor.log

    def log(
        self: Any, step: int, loss: float, _most: float, norm: float, *more: Any, **k: Any
    ) -> None:
        seen.append((step, float(loss), float(norm)))
        own_log(self, step, loss, _most, norm, *more, **k)

    MetricsProcessor.log = log
    make = example.pipelining_fn if job.adaptive else pipeline_llm
    options = {"adaptive": {"options": Options(control=Arriving(plan))}} if job.adaptive else {}

    def sums_on_gloo(model: Any, **given: Any) -> Any:
        built = make(model, **given, **options)
        for part in built[1]:
            for module in part.modules():
                if hasattr(module, "set_force_sum_reduction_for_comms"):
                    # gloo has no PREMUL_SUM.
                    module.set_force_sum_reduction_for_comms(True)
        return built

    config.model_spec.pipelining_fn = sums_on_gloo
    if job.chunked_loss:
        config.loss = ChunkedLossWrapper.Config(loss_fn=config.loss)
    config.training = replace(config.training, local_batch_size=4, seq_len=64)
    config.parallelism = replace(
        config.parallelism,
        pipeline_parallel_degree=job.pipeline, data_parallel_shard_degree=job.shard,
        data_parallel_replicate_degree=job.replicate, tensor_parallel_degree=job.tensor,
        pipeline_parallel_schedule=job.schedule,
    )  # fmt: skip
    recompute = {"": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}
    config.activation_checkpoint = recompute[job.recompute]
    return config, seen
