"""A small transformer that is cut into stages and distributed in every way, and the run of the
whole model on one process that every way must equal."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH, HEAD, VOCABULARY, LENGTH, LAYERS = 8, 2, 11, 4, 4
TENSOR_PLAN = {
    "q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(),
    "o": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(),
}  # fmt: skip


class Block(nn.Module):
    """Attention and an MLP. ``context``: the ranks that hold the other parts of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=name == "o"))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.context: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = self.q(normed), self.k(normed), self.v(normed)  # type: ignore[operator]
        if self.context is not None:
            k, v = (collectives.all_gather_tensor_autograd(t, 1, self.context) for t in (k, v))
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in (q, k, v))
        weights = torch.softmax(q @ k.transpose(-1, -2), -1)
        x = x + self.o((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[operator]
        return x + self.down(torch.tanh(self.up(x)))


class Part(nn.Module):
    """Layers of the model, numbered as in the whole model. ``tied``: the output layer's weight is
    that of the embedding."""

    def __init__(self, layers: range, *, tied: bool = False) -> None:
        super().__init__()
        self.tied = tied
        if 0 in layers:
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in layers})
        if LAYERS - 1 in layers:
            self.head = nn.Linear(WIDTH, VOCABULARY)
            if tied and 0 in layers:
                self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "embedding"):
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if hasattr(self, "head") else x


def whole_model(*, tied: bool = False) -> Part:
    torch.manual_seed(7)
    return Part(range(LAYERS), tied=tied).double()


def part_of(model: Part, stage: int, stages: int) -> Part:
    """A copy of the layers of one stage."""
    each = LAYERS // stages
    part = Part(range(stage * each, (stage + 1) * each), tied=model.tied).double()
    part.load_state_dict({k: v for k, v in model.state_dict().items() if k in part.state_dict()})
    return part


def distribute(
    part: Part,
    mesh: DeviceMesh,
    *,
    hybrid: bool = True,
    reshard: tuple[bool | int | None, bool | int | None] = (None, None),
) -> Part:
    """Distribute a stage over the dimensions of the mesh, as torch's trainers do. ``hybrid``: FSDP
    averages over replicas, too. ``reshard``: after the forward, of layers and of the rest."""
    names = mesh.mesh_dim_names or ()
    if "tp" in names and part.tied:
        # Ranks have parts of the vocabulary, of which 11 are no even parts.
        plan: Any = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(
            part, mesh["tp"], {name: how for name, how in plan.items() if hasattr(part, name)}
        )
    for layer in part.layers.values():
        if "tp" in names:
            # Ranks norm parts of the sequence. The weights' gradients are partial sums.
            parallelize_module(
                layer.norm,  # type: ignore[arg-type]
                mesh["tp"],
                PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
            )
            parallelize_module(layer.norm, mesh["tp"], SequenceParallel())  # type: ignore[arg-type]
            parallelize_module(layer, mesh["tp"], TENSOR_PLAN)
        if "cp" in names:
            layer.context = mesh.get_group("cp")  # type: ignore[assignment]
    if "dp_shard" in names:
        hybrid = hybrid and "dp_replicate" in names
        over = ("dp_replicate", "dp_shard") if hybrid else ("dp_shard",)
        data: Any = mesh[over]
        for layer in part.layers.values():
            fully_shard(layer, mesh=data, reshard_after_forward=reshard[0])
        fully_shard(part, mesh=data, reshard_after_forward=reshard[1])
    return part


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch_of(iteration: int, data: int, rows: int) -> tuple[Tensor, Tensor]:
    """The batch of a data-parallel rank."""
    generator = torch.Generator().manual_seed(1000 * data + iteration)
    tokens = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Reference:
    """The whole model on one process: losses, norms and gradients of every iteration."""

    def __init__(self, microbatches: int, rows: int, lr: float, *, tied: bool = False) -> None:
        self._microbatches, self._rows = microbatches, rows
        self.model = whole_model(tied=tied)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)

    def step(
        self, iteration: int, data: int, clip: float
    ) -> tuple[float, float, dict[str, Tensor]]:
        """The loss, the norm, and the gradients before clipping. ``data``: ranks with data of their
        own."""
        sums: dict[str, Tensor] = {}
        total = 0.0
        for rank in range(data):
            tokens, target = batch_of(iteration, rank, self._rows)
            for part in zip(
                tokens.chunk(self._microbatches), target.chunk(self._microbatches), strict=True
            ):
                loss = loss_fn(self.model(part[0]), part[1])
                (loss / self._microbatches).backward()
                total += loss.item() / self._microbatches
            for name, parameter in self.model.named_parameters():
                assert parameter.grad is not None
                sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad
                parameter.grad = None
        for name, parameter in self.model.named_parameters():
            parameter.grad = sums[name] / data
        grads = copy.deepcopy({n: p.grad for n, p in self.model.named_parameters()})
        # In float32, as the pipeline has the norm.
        norm = torch.nn.utils.get_total_norm(list(grads.values())).float()  # type: ignore[arg-type]
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), clip, norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total / data, float(norm), grads  # type: ignore[return-value]
