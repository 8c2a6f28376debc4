"""The script of docs/how-to/torchtitan.md: torchtitan trains its debug Llama with PipeMorph's
schedule.

torchtitan 0.3 supports GPUs; `run_on_cpu` replaces what it lacks for a machine without one. The
data are random tokens, so no dataset or tokenizer is needed.
"""

from dataclasses import dataclass

import torch

from pipemorph_trainer import TrainerContext
from pipemorph_trainer.torch.titan import pipelining_fn

STEPS = 30
"""Steps under plain torchrun; a manifest has its own number."""


def run_on_cpu():
    """Call it before torchtitan's other modules are imported: they look for a GPU then."""
    torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan.components import metrics
    from torchtitan.distributed import utils

    class NoDeviceMemory:
        device_name, device_capacity_gib = "cpu", 0.0

        def get_peak_stats(self):
            return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

        def reset_peak_stats(self):
            pass

    metrics.build_device_memory_monitor = NoDeviceMemory
    utils.set_pg_timeouts = lambda **_: None  # for NCCL's groups only


def make_config(steps):
    """torchtitan's config: two stages of the debug Llama, 16 microbatches, no files."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.components.validate import Validator
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.config.configs import CommConfig, DebugConfig
    from torchtitan.models.common import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import decoder_vocab_size
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    class RandomTokens(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **_):
            self.generator = torch.Generator().manual_seed(dp_rank)
            self.shape = (local_batch_size, seq_len + 1)

        def __iter__(self):
            while True:
                tokens = torch.randint(0, 2048, self.shape, generator=self.generator)
                positions = torch.arange(self.shape[1] - 1).expand(self.shape[0], -1).contiguous()
                inputs = {"input": tokens[:, :-1].contiguous(), "positions": positions}
                yield inputs, tokens[:, 1:].contiguous()

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, *, tokenizer_path):
            super().__init__()

        def encode(self, *_, **__):
            return []

        def decode(self, *_, **__):
            return ""

        def get_vocab_size(self):
            return 2048

    spec = model_registry("debugmodel", attn_backend="varlen")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        tokenizer=NoTokenizer.Config(),
        dataloader=RandomTokens.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=16,
            seq_len=128,
            steps=steps,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=2,
            pipeline_parallel_schedule="1F1B",
            spmd_backend="spmd_types",
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=None,
        validator=Validator.Config(enable=False),
        debug=DebugConfig(seed=7),
        comm=CommConfig(trace_buf_size=0),
        dump_folder="",
    )


if __name__ == "__main__":
    if not torch.cuda.is_available():
        run_on_cpu()
    from torchtitan.tools.logging import init_logger

    init_logger()  # torchtitan prints a line per step.
    config = make_config(TrainerContext.from_env().iterations or STEPS)
    config.model_spec.pipelining_fn = pipelining_fn
    trainer = config.build()
    trainer.train()
    trainer.pp_schedule.close()
    trainer.close()
