"""Messages across a stage boundary: structures of tensors, and the gradients that are needed."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gate import same_bits
from launch import run_ranks
from torch import Tensor, nn

from pipemorph_trainer import Options, Pipeline, TrainerContext
from pipemorph_trainer.agent.messages import NullControlClient, RankTelemetry
from pipemorph_trainer.backward.output_structure import OutputStructure, flatten_output
from pipemorph_trainer.errors import BatchError, ShapeError, SplitError
from pipemorph_trainer.executor.module_runner import ModuleRunner
from pipemorph_trainer.torch.stage_runner import TorchStageRunner

N, STAGES, WIDTH = 4, 3, 6


class Received(NullControlClient):
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
            grads.append(take_grads(module))
    return losses, grads, sizes


def take_grads(module: nn.Module) -> dict[str, Tensor]:
    found = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


def same_grads(found: dict[str, Tensor], expected: dict[str, Tensor], iteration: int) -> None:
    assert found.keys() == expected.keys(), iteration
    for name, value in expected.items():
        same_bits(found[name], value, f"{iteration}: {name}")


def train_alone(
    run: Callable[..., Any], *batch: Tensor, loss_fn: Any = nn.functional.mse_loss
) -> tuple[Tensor, list[Any]]:
    """The loss and outputs of microbatches one after another, without a pipeline. The last tensor
    of the batch is the target."""
    total, outputs = 0.0, []
    for *inputs, target in zip(*(t.chunk(N) for t in batch), strict=True):
        outputs.append(run(*inputs))
        loss = loss_fn(outputs[-1], target)
        total += float(loss.detach())
        (loss / N).backward()
    return torch.tensor(total / N), outputs


def through(modules: Sequence[nn.Module], value: Any) -> Any:
    for module in modules:
        value = module(*(value if isinstance(value, tuple) else (value,)))
    return value


def test_only_gradients_that_are_needed_come_back() -> None:
    found = run_ranks(STAGES, rotated)
    modules = [Rotated(index) for index in range(STAGES)]
    for iteration in range(4):
        for module in modules:
            module.requires_grad_(iteration >= TRAINED_FROM[module.index])
        x, target = make_batch(iteration)
        loss, _ = train_alone(partial(through, modules), x, target)
        for module, (losses, grads, sizes) in zip(modules, found, strict=True):
            same_bits(losses[iteration], loss)
            same_grads(grads[iteration], take_grads(module), iteration)
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
            grads.append(take_grads(module))
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

    def run(x: Tensor, shift: Tensor) -> Any:
        return modules[2](*modules[1](**modules[0](x), shift=shift))

    for iteration in range(3):
        x, target = make_batch(iteration)
        expected, outputs = train_alone(
            run, x, shift_of(iteration), target, loss_fn=structured_loss
        )
        for module, (found, grads) in zip(modules, results, strict=True):
            for loss, output in found[2 * iteration : 2 * iteration + 2]:
                same_bits(loss, expected)
                assert (output is None) is (module.index < STAGES - 1)
                for name, join in (
                    {"out": torch.cat, "count": torch.stack} if output else {}
                ).items():
                    same_bits(output[name], join([each[name] for each in outputs]))
            same_grads(grads[iteration], take_grads(module), iteration)


def test_what_a_stage_cannot_return_is_named() -> None:
    with pytest.raises(SplitError, match=r"output\[1\]\['a'\] of the stage is a set; a stage"):
        flatten_output((torch.ones(1), {"a": {1}, "b": None}))
    tensors, structure = flatten_output([torch.ones(1), None, {"a": torch.ones(2)}])
    assert OutputStructure.decode(structure.encode()) == structure
    positional, named = structure.build_arguments(tensors)
    assert (positional[1], named) == (None, {}) and positional[2]["a"] is tensors[1]
    assert structure == flatten_output([torch.zeros(1), None, {"a": torch.ones(2)}])[1]
    assert str(structure) == "[tensor, None, {'a': tensor}]"
    assert flatten_output(Pair(torch.ones(1), "x")) == flatten_output((torch.ones(1), "x"))
    _, odd = flatten_output([Pair(torch.ones(1), "x")])
    with pytest.raises(ShapeError, match="cannot be described to the next"):
        odd.encode()


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ([{(1, 2): torch.ones(1)}], r"key \(1, 2\), a tuple; between stages keys are strings"),
        ([{"a": [{Colour.RED: 1}]}], "RED: 1>, a Colour"),
        ([{b"a": 1}], "key b'a', a bytes"),
        ([{frozenset({1}): 1}], r"key frozenset\(\{1\}\), a frozenset"),
        ({1: torch.ones(1)}, "key 1; the next stage gets a dict as keyword arguments"),
        ([Colour.RED], r"output\[0\] of the stage is a Colour; a stage returns tensors, Python's"),
        ([np.float64(1.5)], "is a float64"),
        ((torch.ones(1), 1j), "is a complex"),
    ],
)
def test_the_sender_refuses_what_would_arrive_as_something_else(output: Any, error: str) -> None:
    with pytest.raises((ShapeError, SplitError), match=error):
        flatten_output(output)[1].encode()


VALUES = (1, True, 1.0, 0.0, -0.0, math.nan, 0, False, math.inf, -(1 << 63), (1 << 63) - 1, 5e-324)


def valued(context: TrainerContext, route: Any) -> list[str]:
    """Give each microbatch another number, of another type, which sets its result."""
    got: list[str] = []
    values = iter(VALUES * 2)

    class First(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            value = next(values)
            return {"x": super().forward(x), "value": [value, None, "text", 1 << 70, [value]]}

    class Last(nn.Linear):
        def forward(self, x: Tensor, value: Any) -> Tensor:
            got.append(repr(value))
            return super().forward(x)

    with Pipeline(
        (First, Last)[context.rank](WIDTH, WIDTH), context=context, microbatches=N,
        loss_fn=nn.functional.mse_loss, options=Options(route=route),
    ) as pipe:  # fmt: skip
        for call in range(2 * len(VALUES) // N):
            x, target = make_batch(call)
            (pipe.evaluate if call % 3 == 2 else pipe.step)(x, target=target)
    return got


@pytest.mark.parametrize(
    "route", ["direct", pytest.param("delegated", marks=pytest.mark.needs_engine)]
)
def test_numbers_arrive_as_they_were_in_each_microbatch(route: str) -> None:
    _, got = run_ranks(2, valued, route)
    assert got == [repr([value, None, "text", 1 << 70, [value]]) for value in VALUES * 2]


class Changing(nn.Module):
    """A stage that draws noise and counts its calls, and whose output changes with ``mode``."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.index, self.linear, self.mode, self.calls = index, nn.Linear(WIDTH, WIDTH), 0, 0
        self.generator = torch.Generator().manual_seed(index)

    def forward(self, x: Tensor, *rest: Any) -> Any:
        self.calls += 1
        x = torch.tanh(self.linear(x)) + torch.rand(x.shape, generator=self.generator)
        x = x.view(-1, WIDTH) * (1 + len(rest)) + (0.5 if "b" in rest else 0)
        return x if self.index == STAGES - 1 else CHANGES[self.mode](x)


CHANGES: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: x,
    lambda x: x.detach(),
    lambda x: x[None].contiguous(),
    lambda x: (x, torch.ones(2), None),
    lambda x: (x, "a"),
    lambda x: (x, "b"),
    lambda x: (x, x.bfloat16()),
)
MODES = ((0, 0), (1, 0), (0, 0), (2, 2), (2, 0), (3, 1), (3, 4), (4, 4), (5, 4), (6, 6), (0, 1))
"""Modes of the first two stages, by iteration. No input changes with it."""


def changing(context: TrainerContext, options: dict[str, Any]) -> Any:
    place = context.coordinate(STAGES)
    module = Changing(place.stage)
    found = []
    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=N, stages=STAGES,
        deadline_seconds=30.0, options=Options(**options),
    ) as pipe:  # fmt: skip
        for iteration, modes in enumerate(MODES):
            module.mode = (*modes, 0)[place.stage]
            x, target = make_batch(iteration)
            loss = pipe.step(x, target=target)
            found.append((loss, take_grads(module)))
    assert module.calls == N * len(MODES)
    return place.stage, found


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (STAGES, {"route": "direct"}),
        pytest.param(STAGES, {"route": "delegated"}, marks=pytest.mark.needs_engine),
        (STAGES, {"dispatch": "guided"}),
        (2 * STAGES, {}),
    ],
    ids=["direct", "delegated", "guided", "replicas"],
)
def test_what_changes_at_a_boundary_is_sent_again_and_nothing_runs_twice(
    ranks: int, options: dict[str, Any]
) -> None:
    found = run_ranks(ranks, changing, options)
    modules = [Changing(index) for index in range(STAGES)]
    for iteration, modes in enumerate(MODES):
        for module, mode in zip(modules, (*modes, 0), strict=True):
            module.mode = mode
        expected, _ = train_alone(partial(through, modules), *make_batch(iteration))
        of_stages = [take_grads(module) for module in modules]
        for stage, results in found:
            # Replicas have the same data here, so their mean is that of one.
            loss, grads = results[iteration]
            same_bits(loss, expected, f"loss of {iteration}")
            same_grads(grads, of_stages[stage], iteration)


class Workspace(torch.autograd.Function):
    """A fused kernel that writes to memory of its module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor) -> Tensor:
        torch.mul(x, 2, out=out)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad, None


class Own(nn.Module):
    """A stage with memory that each forward writes to, and a function of it and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.linear = function, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("mean", torch.ones(2, WIDTH))
        self.plain, self.held = torch.zeros(2, WIDTH), []

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            for memory in (self.mean, self.plain, *self.held):
                memory.mul_(0.5).add_(x.sum())
            self.count += 1
        return self.function(self, x)


def keeps_output(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.linear(x)
    m.held = [out.detach()]
    return out


def keeps_part(m: Any, x: Tensor) -> Tensor:
    both: Tensor = torch.cat([m.linear(x), x])
    m.held = [both.detach()[:1]]
    return both[:2]


def writes_in_place(m: Any, x: Tensor) -> Tensor:
    m.plain = m.plain.detach().copy_(m.linear(x))
    return m.plain


def writes_weight(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.linear.weight.add_(x.sum())
    return m.linear.weight


OWN = {
    "buffer": lambda m, x: (m.linear(x), m.count),
    "view of a buffer": lambda m, x: {"x": m.linear(x), "mean": m.mean.t()[1:]},
    "plain attribute": lambda m, x: m.plain,
    "out=": lambda m, x: torch.mul(x, 2, out=m.plain),
    "custom function": lambda m, x: Workspace.apply(m.linear(x), m.plain),
    "own output": keeps_output,
    "part of an output": keeps_part,
    "in place with a graph": writes_in_place,
    "parameter": writes_weight,
    "numpy": lambda m, x: torch.from_numpy(m.plain.numpy()),
    "buffer in a list": lambda m, x: [m.linear(x), {"a": [m.mean[0].expand(3, -1)]}],
}


@pytest.mark.parametrize("place", ["first", "last", "evaluation", "torch's stage"])
@pytest.mark.parametrize("function", OWN.values(), ids=OWN.keys())
def test_what_a_stage_returned_stays_while_it_runs_on(
    function: Callable[[Any, Tensor], Any], place: str
) -> None:
    inputs = make_batch(0)[0].chunk(N)
    alone, whole = Own(function), Own(function)
    wanted = [[each.clone() for each in flatten_output(alone(x))[0]] for x in inputs]
    last = place == "last"
    runner = ModuleRunner(
        whole, is_first=True, is_last=last, microbatches=N,
        loss_fn=(lambda out, target: whole.mean[0, 0]) if last else None,
    )  # fmt: skip
    outputs: list[Any] = []
    runner.begin_iteration(fused=frozenset(), outputs=outputs)
    run = runner.evaluate_microbatch if place == "evaluation" else runner.run_forward
    if place == "torch's stage":
        ops: Any = SimpleNamespace(
            run_forward=lambda k, args, *_, **__: flatten_output(whole(*args))[0]
        )
        run = TorchStageRunner(
            ops, splits=False, walk=None, loss_of=None, loss_kept=lambda k: None
        ).run_forward
    sent = [run(k, (x,), target=0) for k, x in enumerate(inputs)]
    if last:
        assert len({float(loss) for (loss,) in sent}) == N
        sent = [flatten_output(each)[0] for each in outputs]
    for k, (found, expected) in enumerate(zip(sent, wanted, strict=True)):
        for mine, its in zip(found, expected, strict=True):
            same_bits(mine.detach(), its, f"microbatch {k}")


def test_what_an_op_has_just_made_is_sent_without_a_copy() -> None:
    runner = ModuleRunner(nn.Linear(WIDTH, WIDTH), is_first=True, is_last=False, microbatches=N)
    (sent,) = runner.run_forward(0, (make_batch(0)[0],))
    assert sent.data_ptr() == runner._flights[0].outputs[0].data_ptr()
