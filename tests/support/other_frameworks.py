"""Pipelines of Megatron-Core and DeepSpeed on CPU and gloo, on ranks of :mod:`launch`.

What Megatron-Core asks of CUDA is replaced here, and nothing else.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipemorph_trainer.context import TrainerContext

STEPS, MICROBATCHES = 3, 6
LENGTH, WIDTH, WORDS = 32, 64, 128


class FrameworkRun(NamedTuple):
    """Training of three steps. ``chunks``: virtual stages of Megatron-Core per rank. ``overlap``:
    its receives, and the reductions over ``replicas``, are waited for later. ``tied``: input and
    output layers share a weight."""

    framework: str
    chunks: int = 1
    overlap: bool = False
    replicas: int = 1
    tied: bool = False
    observed: bool = True


def train_framework(context: TrainerContext, run: FrameworkRun, folder: str) -> dict[str, Any]:
    """Train on this rank, observed or not. Returns losses, as hexadecimal, and a hash of gradients
    or of parameters."""
    from pipemorph_trainer.observe import observe

    observation = observe(folder) if run.observed else None
    os.environ.update(
        RANK=str(context.rank), LOCAL_RANK=str(context.rank), WORLD_SIZE=str(context.world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(context.master_port),
    )  # fmt: skip
    found = train_megatron(run) if run.framework == "megatron" else train_deepspeed()
    if observation is not None:
        assert observation.active
        observation.stop()
    dist.barrier()
    dist.destroy_process_group()
    return found


class _OnCpu(TorchFunctionMode):
    """Makes tensors that are asked for on CUDA on the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def _replace_cuda() -> None:
    cuda: Any = torch.cuda
    tensor: Any = Tensor
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *_, **__: None
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    tensor.cuda = lambda self, *_, **__: self
    random: Any = import_module("megatron.core.tensor_parallel.random")
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()


def train_megatron(run: FrameworkRun) -> dict[str, Any]:
    """Train a small GPT of Megatron-Core, a layer per chunk."""
    dist.init_process_group("gloo")
    _replace_cuda()
    state: Any = import_module("megatron.core.parallel_state")
    models: Any = import_module("megatron.core.models.gpt.gpt_model")
    specs: Any = import_module("megatron.core.models.gpt.gpt_layer_specs")
    transformer: Any = import_module("megatron.core.transformer")
    pipelines: Any = import_module("megatron.core.pipeline_parallel")
    random: Any = import_module("megatron.core.tensor_parallel.random")
    distributed: Any = import_module("megatron.core.distributed")
    stages = dist.get_world_size() // run.replicas
    virtual = run.chunks if run.chunks > 1 else None
    state.initialize_model_parallel(1, stages, virtual_pipeline_model_parallel_size=virtual)
    with _OnCpu():
        random.model_parallel_cuda_manual_seed(123)
        config = transformer.TransformerConfig(
            num_layers=stages * run.chunks, hidden_size=WIDTH, num_attention_heads=4,
            use_cpu_initialization=True, pipeline_dtype=torch.float32, attention_dropout=0.0,
            hidden_dropout=0.0, pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=virtual, bias_activation_fusion=False,
            bias_dropout_fusion=False, masked_softmax_fusion=False,
            gradient_accumulation_fusion=False, overlap_p2p_comm=run.overlap,
            batch_p2p_comm=not run.overlap,
        )  # fmt: skip
        torch.manual_seed(5)
        chunks = []
        for chunk in range(run.chunks):
            where = {"vp_stage": chunk} if virtual else {}
            flat = {"ignore_virtual": not virtual, **where}
            chunks.append(
                models.GPTModel(
                    config=config, transformer_layer_spec=specs.get_gpt_layer_local_spec(),
                    vocab_size=WORDS, max_sequence_length=LENGTH,
                    pre_process=state.is_pipeline_first_stage(**flat),
                    post_process=state.is_pipeline_last_stage(**flat),
                    share_embeddings_and_output_weights=run.tied,
                    position_embedding_type="learned_absolute", **where,
                )
            )  # fmt: skip
        if run.replicas > 1:
            # Reduced buckets as in Megatron's training loop.
            settings = distributed.DistributedDataParallelConfig(
                overlap_grad_reduce=run.overlap, bucket_size=20_000
            )
            chunks = [
                distributed.DistributedDataParallel(config, settings, chunk) for chunk in chunks
            ]
            config.finalize_model_grads_func = distributed.finalize_model_grads
            config.no_sync_func = [chunk.no_sync for chunk in chunks]
            if not virtual:
                config.no_sync_func = config.no_sync_func[0]
        parameters = [p for chunk in chunks for p in chunk.parameters()]
        optimizer = torch.optim.SGD(parameters, 1e-2)
        step = pipelines.get_forward_backward_func()
        hashed, losses = hashlib.sha256(), list[str]()
        data = [_draw_tokens() for _ in chunks]
        for _ in range(STEPS):
            optimizer.zero_grad()
            for chunk in chunks if run.replicas > 1 else ():
                chunk.zero_grad_buffer()
            outputs = step(
                forward_step_func=_run_forward, model=chunks if virtual else chunks[0],
                data_iterator=data if virtual else data[0], num_microbatches=MICROBATCHES,
                seq_length=LENGTH, micro_batch_size=2, forward_only=False,
            )  # fmt: skip
            losses += [float(each["loss"]).hex() for each in outputs]
            for parameter in parameters:
                parameter.grad = getattr(parameter, "main_grad", parameter.grad)
                if parameter.grad is not None:
                    hashed.update(parameter.grad.numpy().tobytes())
            optimizer.step()
    return {"losses": losses, "hash": hashed.hexdigest()}


def _draw_tokens() -> Iterator[Tensor]:
    # Replicas have other samples.
    state: Any = import_module("megatron.core.parallel_state")
    generator = torch.Generator().manual_seed(1 + state.get_data_parallel_rank())
    while True:
        yield torch.randint(0, WORDS, (2, LENGTH + 1), generator=generator)


def _run_forward(data: Iterator[Tensor], model: nn.Module) -> Any:
    tokens = next(data)
    positions = torch.arange(LENGTH).unsqueeze(0).expand(2, -1)
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    output = model(tokens[:, :-1].contiguous(), positions, mask, labels=tokens[:, 1:].contiguous())

    def compute_loss(each: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = each.float().mean()
        return loss, {"loss": loss.detach()}

    return output, compute_loss


def train_deepspeed() -> dict[str, Any]:
    """Train a ``PipelineModule`` of DeepSpeed, unchanged."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed: Any = import_module("deepspeed")
    pipe: Any = import_module("deepspeed.pipe")
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(3)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    module = pipe.PipelineModule(
        layers=layers, loss_fn=nn.MSELoss(), num_stages=dist.get_world_size(),
        partition_method="uniform",
    )  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": MICROBATCHES,
            "train_batch_size": 4 * MICROBATCHES, "steps_per_print": 100,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
        },
    )  # fmt: skip

    def draw_batches() -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        while True:
            x = torch.randn(4, WIDTH, generator=generator)
            yield x, 0.5 * x

    data = draw_batches()
    losses = [float(engine.train_batch(data_iter=data)).hex() for _ in range(STEPS)]
    hashed = hashlib.sha256()
    for parameter in module.parameters():
        hashed.update(parameter.detach().numpy().tobytes())
    return {"losses": losses, "hash": hashed.hexdigest()}
