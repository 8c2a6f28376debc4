"""Byte-level GPT, trained on the sources of Python's standard library.

It runs on GPUs if there is one for every rank of the machine, else on the CPU. With one rank per
stage and ``transport.route: delegated``, ranks share the available GPUs.

Run it with ``pipemorph run examples/gpt.yaml --out out/gpt``. ``spec.trainer.args``:

=============== ======= =====================================================
argument        default meaning
=============== ======= =====================================================
width           128     model width
heads           4       attention heads; must divide width
sequence        128     bytes per sample
microbatch_size 4       samples per microbatch
learning_rate   1e-3    AdamW, constant
clip            1.0     global gradient norm
=============== ======= =====================================================
"""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from pipemorph.errors import InputError
from pipemorph_trainer import ModelShard, Pipeline, TrainerContext, make_mesh
from pipemorph_trainer.devices import choose_device

VOCABULARY = 256
CORPUS_BYTES = 4 << 20


@dataclass(frozen=True)
class GPTArguments:
    """Model and data size; see the module's table."""

    width: int = 128
    heads: int = 4
    sequence: int = 128
    microbatch_size: int = 4
    learning_rate: float = 1e-3
    clip: float = 1.0

    @staticmethod
    def from_context(context: TrainerContext) -> GPTArguments:
        known = {f.name: f for f in fields(GPTArguments)}
        for name, value in context.args.items():
            if name not in known:
                raise InputError(f"spec.trainer.args.{name} is unknown; known: {', '.join(known)}")
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            whole = isinstance(getattr(GPTArguments, name), int)
            if not number or value <= 0 or (whole and not isinstance(value, int)):
                kind = "a whole number" if whole else "a number"
                raise InputError(f"spec.trainer.args.{name} is {value!r}; expected {kind} above 0")
        arguments = GPTArguments(**context.args)
        if arguments.width % arguments.heads:
            raise InputError(
                f"spec.trainer.args.width is {arguments.width}, which {arguments.heads} heads do "
                f"not divide; use a multiple of {arguments.heads}"
            )
        return arguments


class TransformerBlock(nn.Module):
    """Pre-norm transformer block; (batch, sequence, width) in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        qkv = self.qkv(self.norm_attention(x))
        # Split by heads; a tensor-parallel rank has some of them.
        qkv = qkv.view(batch, sequence, -1, 3, width // self.heads)
        q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        hidden: Tensor = functional.gelu(self.up(self.norm_mlp(x)))
        out: Tensor = x + self.down(hidden)
        return out


class GPTStage(nn.Module):
    """Stage of the model: embedding on the first, head on the last, blocks on each.

    First stage: int64 tokens (batch, sequence) in; last stage: logits
    (batch, sequence, 256) out; between stages (batch, sequence, width).
    """

    def __init__(self, arguments: GPTArguments, part: ModelShard, layers: int) -> None:
        super().__init__()
        self.first, self.last = part.is_first, part.is_last
        if self.first:
            self.tokens = nn.Embedding(VOCABULARY, arguments.width)
            self.positions = nn.Embedding(arguments.sequence, arguments.width)
        # Named by global layer numbers, so that checkpoints fit other numbers of stages.
        self.blocks = nn.ModuleDict(
            {
                str(layer): TransformerBlock(arguments.width, arguments.heads)
                for layer in part.layers(layers)
            }
        )
        if self.last:
            self.norm = nn.LayerNorm(arguments.width)
            self.head = nn.Linear(arguments.width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        if self.last:
            x = self.head(self.norm(x))
        return x


def shard_stage(stage: GPTStage, mesh: DeviceMesh) -> None:
    """Divide heads and MLPs over tensor-parallel ranks, and shard the parts over data-parallel
    ranks, if the mesh has such ranks."""
    names = mesh.mesh_dim_names or ()
    for block in stage.blocks.values():
        if "tp" in names:
            # These imports take longer than that of torch.
            from torch.distributed.tensor.parallel import (
                ColwiseParallel,
                RowwiseParallel,
                parallelize_module,
            )

            columns, rows = ColwiseParallel(), RowwiseParallel()
            plan = {"qkv": columns, "out": rows, "up": columns, "down": rows}
            parallelize_module(block, mesh["tp"], plan)
        if "dp_shard" in names:
            from torch.distributed.fsdp import fully_shard

            fully_shard(block, mesh=mesh["dp_shard"])
    if "dp_shard" in names:
        fully_shard(stage, mesh=mesh["dp_shard"])


def load_corpus() -> Tensor:
    """Load the first :data:`CORPUS_BYTES` of the standard library's sources in order of names;
    uint8."""
    root = Path(sysconfig.get_paths()["stdlib"])
    chunks, size = [], 0
    for path in sorted(root.glob("*.py")) + sorted(root.glob("*/*.py")):
        chunks.append(path.read_bytes())
        size += len(chunks[-1])
        if size >= CORPUS_BYTES:
            break
    if not size:
        raise InputError(f"no Python sources under {root}; the example trains on those")
    return torch.frombuffer(bytearray(b"".join(chunks)[:CORPUS_BYTES]), dtype=torch.uint8)


def sample_batch(
    corpus: Tensor, *, seed: int, iteration: int, replica: int, batch: int, sequence: int
) -> tuple[Tensor, Tensor]:
    """Sample tokens and next tokens, int64 (batch, sequence): a replica's part of an iteration's
    samples if all replicas have ``batch``. A pure function of its arguments: ranks with the same
    data draw the same samples, a resumed run continues with the same data, and fewer replicas with
    larger parts draw the samples of all."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + iteration * 4099)
    drawn = ((replica + 1) * batch,)
    starts = torch.randint(0, len(corpus) - sequence - 1, drawn, generator=generator)[-batch:]
    rows = torch.stack([corpus[s : s + sequence + 1] for s in starts.tolist()]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def train(context: TrainerContext) -> None:
    if context.job is None:
        raise InputError("start this example with: pipemorph run examples/gpt.yaml --out DIR")
    spec = context.job.spec
    arguments = GPTArguments.from_context(context)
    stages = spec.parallelism.stages
    layers = spec.parallelism.layers or stages
    if spec.parallelism.context > 1:
        raise InputError("spec.parallelism.context: this example has no context-parallel attention")
    if arguments.heads % spec.parallelism.tensor:
        raise InputError(
            f"spec.trainer.args.heads is {arguments.heads}, which spec.parallelism.tensor, "
            f"{spec.parallelism.tensor}, does not divide"
        )
    alone = spec.parallelism.world_size == stages
    device = choose_device(context.local_rank, share=alone and spec.transport.route == "delegated")
    mesh = make_mesh(context, device)
    corpus = load_corpus()

    def build_stage(part: ModelShard) -> GPTStage:
        # A seed per stage makes its weights independent of other stages.
        torch.manual_seed(spec.trainer.seed * 1000 + part.stage)
        module = GPTStage(arguments, part, layers).to(device)
        shard_stage(module, mesh)
        return module

    def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=arguments.learning_rate)

    with Pipeline(
        build_stage, context=context, mesh=mesh, loss_fn=loss_fn, optimizer=make_optimizer
    ) as pipe:
        coordinate = pipe.coordinate
        for iteration in range(pipe.start_iteration, spec.trainer.iterations):
            tokens, target = sample_batch(
                corpus,
                seed=spec.trainer.seed,
                iteration=iteration,
                replica=coordinate.dp_rank,
                batch=arguments.microbatch_size * spec.schedule.microbatches,
                sequence=arguments.sequence,
            )
            pipe.step(tokens.to(device), target=target.to(device))
            pipe.clip_grad_norm_(arguments.clip)
            pipe.optimizer.step()
            pipe.optimizer.zero_grad()


def main() -> int:
    try:
        train(TrainerContext.from_env())
    except InputError as error:
        print(f"gpt: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
