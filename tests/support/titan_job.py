"""torchtitan's own trainer, for its debug Llama on CPU and gloo, on ranks of :mod:`launch`.

What torchtitan 0.3 lacks for a CPU is replaced here, and nothing else: its model, its loss, its
wrappers, its optimizer and its training loop are what runs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import trainer_jobs

from pipemorph.planning import Plan
from pipemorph.planning.ir import StagePlacement
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer import Options, TrainerContext
from pipemorph_trainer.agent.messages import NullControlClient
from pipemorph_trainer.agent.rank_plan import RankPlan

STEPS = 4


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


def configure(job: TitanJob, plan: RankPlan | None) -> tuple[Any, list[tuple[int, float, float]]]:
    """torchtitan's config, and the list that gets what it logs. ``plan``: arrives on this rank."""
    # Before torchtitan's modules read it.
    torch._utils._get_available_device_type = lambda: "cpu"
    import torchtitan.components.metrics as metrics
    import torchtitan.distributed.utils as distributed

    class NoMemory:
        device_name, device_capacity_gib = "cpu", 0.0

        def get_peak_stats(self) -> Any:
            return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

        def reset_peak_stats(self) -> None: ...

    metrics.build_device_memory_monitor = NoMemory
    distributed.set_pg_timeouts = lambda **_: None

    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.components.validate import Validator
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.config.configs import CommConfig, DebugConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.common import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import decoder_vocab_size
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    from pipemorph_trainer.torch.titan import pipelining_fn

    class RandomData(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, dp_rank: int, seq_len: int, local_batch_size: int,
                     **_: Any) -> None:  # fmt: skip
            self.generator = torch.Generator().manual_seed(1234 + dp_rank)
            self.shape = (local_batch_size, seq_len + 1)

        def __iter__(self) -> Iterator[Any]:
            while True:
                tokens = torch.randint(0, 2048, self.shape, generator=self.generator)
                positions = torch.arange(self.shape[1] - 1).expand(self.shape[0], -1).contiguous()
                inputs = {"input": tokens[:, :-1].contiguous(), "positions": positions}
                yield inputs, tokens[:, 1:].contiguous()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    class NoTokens(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, *, tokenizer_path: str) -> None:
            super().__init__()

        def encode(self, *_: Any, **__: Any) -> list[int]:
            return []

        def decode(self, *_: Any, **__: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return 2048

    seen: list[tuple[int, float, float]] = []
    own_log = MetricsProcessor.log

    def log(
        self: Any, step: int, loss: float, _most: float, norm: float, *more: Any, **k: Any
    ) -> None:
        seen.append((step, float(loss), float(norm)))
        own_log(self, step, loss, _most, norm, *more, **k)

    MetricsProcessor.log = log
    spec = model_registry("debugmodel", attn_backend="varlen")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    make = pipelining_fn if job.adaptive else pipeline_llm
    options = {"adaptive": {"options": Options(control=Arriving(plan))}} if job.adaptive else {}

    def sums_on_gloo(model: Any, **given: Any) -> Any:
        built = make(model, **given, **options)
        for part in built[1]:
            for module in part.modules():
                if hasattr(module, "set_force_sum_reduction_for_comms"):
                    # gloo has no PREMUL_SUM.
                    module.set_force_sum_reduction_for_comms(True)
        return built

    spec.pipelining_fn = sums_on_gloo
    loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
    recompute = {"": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}
    config = Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(loss_fn=loss) if job.chunked_loss else loss,
        tokenizer=NoTokens.Config(),
        dataloader=RandomData.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=4, seq_len=64, steps=STEPS, disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=job.pipeline, data_parallel_shard_degree=job.shard,
            data_parallel_replicate_degree=job.replicate, tensor_parallel_degree=job.tensor,
            pipeline_parallel_schedule=job.schedule,
            spmd_backend="spmd_types",
        ),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=recompute[job.recompute],
        validator=Validator.Config(enable=False),
        debug=DebugConfig(seed=7),
        comm=CommConfig(trace_buf_size=0),
        dump_folder="",
    )  # fmt: skip
    return config, seen
