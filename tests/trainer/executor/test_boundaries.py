"""What crosses a stage boundary: structures of tensors, and the gradients that are needed."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from gate import same_bits
from launch import run_ranks
from torch import Tensor, nn

from pipemorph_trainer import Options, Pipeline, TrainerContext
from pipemorph_trainer.agent.messages import NoControl, RankTelemetry
from pipemorph_trainer.errors import BatchError, ShapeError, SplitError
from pipemorph_trainer.executor.stages.structure import Structure, take_apart

N, STAGES, WIDTH = 4, 3, 6


class Received(NoControl):
    """Bytes that came from the stage below."""

    def __init__(self) -> None:
        self.bytes = 0

    def publish(self, telemetry: RankTelemetry) -> None:
        self.bytes += sum(link.bytes for link in telemetry.links if link.direction == "backward")


class Rotated(nn.Module):
    """Passes a table of floats on that is no parameter, as rotary embeddings do."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.index, self.linear = index, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, table: Tensor | None = None) -> Any:
        if table is None:
            table = torch.cos(torch.arange(x.numel() * 10.0)).view(-1, *x.shape)
        x = torch.tanh(self.linear(x)) * table[0]
        return x if self.index == STAGES - 1 else (x, table)


def make_batch(iteration: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(iteration)
    x = torch.randn(2 * N, WIDTH, generator=generator)
    return x, x.flip(1)


TRAINED_FROM = (2, 1, 0)
"""Iteration from which on each stage is trained. It is frozen before."""


def rotated(context: TrainerContext) -> tuple[list[Tensor], list[dict[str, Tensor]], list[int]]:
    module, received = Rotated(context.rank), Received()
    losses, grads, sizes = [], [], []
    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=N,
        policy="1f1b", options=Options(route="direct", control=received),
    ) as pipe:  # fmt: skip
        for iteration in range(4):
            module.requires_grad_(iteration >= TRAINED_FROM[context.rank])
            x, target = make_batch(iteration)
            before = received.bytes
            losses.append(pipe.step(x, target=target))
            sizes.append(received.bytes - before)
            grads.append({n: p.grad.clone() for n, p in named_grads(module)})
            module.zero_grad()
    return losses, grads, sizes


def named_grads(module: nn.Module) -> list[tuple[str, Any]]:
    return [(n, p) for n, p in module.named_parameters() if p.grad is not None]


def test_only_gradients_that_are_needed_come_back() -> None:
    found = run_ranks(STAGES, rotated)
    modules = [Rotated(index) for index in range(STAGES)]
    for iteration in range(4):
        for module in modules:
            module.requires_grad_(iteration >= TRAINED_FROM[module.index])
        x, target = make_batch(iteration)
        total = 0.0
        for a, b in zip(x.chunk(N), target.chunk(N), strict=True):
            value: Any = (a,)
            for module in modules:
                value = module(*value)
            loss = nn.functional.mse_loss(value, b)
            total += float(loss.detach())
            (loss / N).backward()
        for module, (losses, grads, sizes) in zip(modules, found, strict=True):
            same_bits(losses[iteration], torch.tensor(total / N))
            expected = dict(named_grads(module))
            assert grads[iteration].keys() == expected.keys()
            for name, parameter in expected.items():
                same_bits(grads[iteration][name], parameter.grad, f"{iteration}: {name}")
            module.zero_grad()
            # The gradient of x only, and none while this stage and those above are frozen.
            needed = module.index < STAGES - 1 and iteration >= TRAINED_FROM[module.index]
            float32 = 4
            assert sizes[iteration] == needed * x.numel() * float32, (module.index, iteration)


class Pair(NamedTuple):
    mean: Tensor
    label: str


class Structured(nn.Module):
    """Passes its tensors on in dicts, lists and named tuples, with numbers and None."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.index, self.linear = index, nn.Linear(WIDTH, WIDTH)


class First(Structured):
    def forward(self, x: Tensor) -> Any:
        x = self.linear(x)
        mask = x.detach() > 0
        extra = {"mask": mask, "factor": 2.0, "none": None, "pair": [x.mean(), mask.sum()]}
        return OrderedDict(x=x, extra=extra, name="first")


class Middle(Structured):
    def forward(self, x: Tensor, extra: Any, *, name: str, shift: Tensor) -> Any:
        assert (name, extra["none"], type(extra["pair"])) == ("first", None, list)
        mean, count = extra["pair"]
        x = self.linear(x * extra["mask"]) * extra["factor"] + shift
        return x, (mean, None), {"count": count, 1: [True]}


class Last(Structured):
    def forward(self, x: Tensor, means: Any, more: Any) -> Any:
        assert means[1] is None and more[1] == [True]
        return {"out": torch.tanh(self.linear(x)) + means[0], "count": more["count"]}


def structured_loss(output: Any, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output["out"], target) * output["count"]


STRUCTURED = (First, Middle, Last)


def shift_of(iteration: int) -> Tensor:
    return torch.arange(2.0 * N * WIDTH).view(2 * N, WIDTH) / (10 + iteration)


def structured(context: TrainerContext, route: Any) -> tuple[list[Any], list[dict[str, Tensor]]]:
    module = STRUCTURED[context.rank](context.rank)
    found, grads = [], []
    with Pipeline(
        module,
        context=context,
        loss_fn=structured_loss,
        microbatches=N,
        options=Options(route=route),
    ) as pipe:
        for iteration in range(3):
            x, target = make_batch(iteration)
            named = {"shift": shift_of(iteration)} if context.rank == 1 else {}
            found.append(pipe.evaluate(x, target=target, return_outputs=True, **named))
            found.append(pipe.step(x, target=target, return_outputs=True, **named))
            grads.append({n: p.grad.clone() for n, p in named_grads(module)})
            module.zero_grad()
        if context.rank == 1:
            named["name"] = "another"
        with pytest.raises(BatchError, match="'name' from the stage above and from the keyword"):
            pipe.step(x, target=target, **named)
    return found, grads


@pytest.mark.parametrize(
    "route",
    [
        pytest.param("direct", marks=pytest.mark.full),
        pytest.param("delegated", marks=pytest.mark.needs_engine),
    ],
)
def test_a_stage_gets_the_structure_that_the_one_above_returned(route: str) -> None:
    results = run_ranks(STAGES, structured, route)
    modules: list[Any] = [make(index) for index, make in enumerate(STRUCTURED)]
    for iteration in range(3):
        total, outputs = 0.0, []
        parts = (*make_batch(iteration), shift_of(iteration))
        for x, target, shift in zip(*(t.chunk(N) for t in parts), strict=True):
            outputs.append(modules[2](*modules[1](**modules[0](x), shift=shift)))
            loss = structured_loss(outputs[-1], target)
            total += float(loss.detach())
            (loss / N).backward()
        for module, (found, grads) in zip(modules, results, strict=True):
            for loss, output in found[2 * iteration : 2 * iteration + 2]:
                same_bits(loss, torch.tensor(total / N))
                assert (output is None) is (module.index < STAGES - 1)
                if output is not None:
                    same_bits(output["out"], torch.cat([each["out"] for each in outputs]))
                    same_bits(output["count"], torch.stack([each["count"] for each in outputs]))
            for name, parameter in named_grads(module):
                same_bits(grads[iteration][name], parameter.grad, f"{iteration}: {name}")
            module.zero_grad()


def test_what_a_stage_cannot_return_is_named() -> None:
    with pytest.raises(SplitError, match=r"output\[1\]\['a'\] of the stage is a set; a stage"):
        take_apart((torch.ones(1), {"a": {1}, "b": None}))
    tensors, structure = take_apart([torch.ones(1), None, {"a": torch.ones(2)}])
    assert Structure.decode(structure.encode()) == structure
    positional, named = structure.arguments(tensors)
    assert (positional[1], named) == (None, {}) and positional[2]["a"] is tensors[1]
    assert take_apart(Pair(torch.ones(1), "x")) == take_apart((torch.ones(1), "x"))
    _, odd = take_apart([Pair(torch.ones(1), "x")])
    with pytest.raises(ShapeError, match="cannot be described to the next"):
        odd.encode()
