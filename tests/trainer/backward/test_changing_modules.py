"""Stages that change while they train: layers are pruned, quantized, tied, frozen or replaced,
hooks come and go, and state lies outside of the module. The bits are those of a plain loop, in
every iteration and op order."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gate import same_bits
from split_support import Lambda as Stage
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from pipemorph_trainer.executor.module_runner import ModuleRunner
from pipemorph_trainer.torch import split_backward

torch.set_num_threads(1)

WIDTH, N, ITERATIONS = 6, 4, 5
ORDERS = (
    "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
    "F0 BW0 F1 BW1 F2 BW2 F3 BW3",
    "F0 F1 F2 F3 B0 B1 B2 B3 W0 W1 W2 W3",
    "F0 F1 BW0 F2 B1 F3 B2 W1 W2 BW3",
)
Act = Callable[[nn.Module], None]
Extra = dict[str, "Tensor | None"]


@dataclass
class Case:
    """Stage, and its changes. ``late``: before iteration 2; ``after``: each iteration.

    ``extra``: what is compared besides. ``loss``: makes the loss of the last stage, and is given
    the module.
    """

    make: Callable[[], nn.Module]
    late: Act = lambda module: None
    after: Act = lambda module: None
    extra: Callable[[nn.Module], Extra] = lambda module: {}
    loss: Callable[[nn.Module], Callable[[Any, Any], Tensor]] | None = None
    shape: tuple[int, ...] = (3, WIDTH)
    steps: bool = True
    """True if the optimizer steps, which some stages do themselves."""
    alone: bool = False
    """True if the stage writes to what its backwards need, so that one microbatch is under way."""
    late_rounds: bool = False
    """True if a use that begins later is summed in the order of ops in its first iteration."""


def lin() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def two() -> Stage:
    return Stage(lambda m, x: m.b(torch.tanh(m.a(x))), a=lin(), b=lin())


def conv() -> Stage:
    layers = {name: nn.Conv2d(2, 2, 3, padding=1) for name in "ab"}
    return Stage(lambda m, x: m.b(torch.tanh(m.a(x))), **layers)


IMAGES = (3, 2, 5, 5)


def replace_forward(m: Any) -> None:
    """Replace a forward, as quantization-aware training and accelerate's hooks do."""
    m.b.forward = lambda x: F.linear(x, m.b.weight + (m.b.weight.round() - m.b.weight).detach())


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


def swap_class(m: Any) -> None:
    m.b.__class__ = Doubled


def tie(m: Any) -> None:
    m.b.weight = m.a.weight


def new_layer(m: Any) -> None:
    torch.manual_seed(9)
    m.b = copy.deepcopy(m.b)
    for parameter in m.b.parameters():
        nn.init.normal_(parameter)


def freeze(m: Any) -> None:
    m.a.weight.requires_grad_(not m.a.weight.requires_grad)


def frozen(made: Stage) -> Stage:
    freeze(made)
    return made


def halve(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


def hook(m: Any) -> None:
    m.a.weight.register_hook(lambda grad: grad * 2)
    m.b.bias.register_post_accumulate_grad_hook(halve)


def by_functional_call(on: bool) -> Stage:
    def forward(m: Any, x: Tensor) -> Tensor:
        if not m.on:
            return m.inner(x)
        weights = {name: p * m.gain for name, p in m.inner.named_parameters()}
        return torch.func.functional_call(m.inner, weights, (x,))

    return Stage(forward, inner=two(), gain=nn.Parameter(torch.tensor(1.5)), on=on)


def turn_on(m: Any) -> None:
    m.on = True


def used_elsewhere(on: bool) -> Stage:
    def forward(m: Any, x: Tensor) -> Tensor:
        out: Tensor = m.b(torch.tanh(m.a(x)))
        return out * m.a.weight.pow(2).sum() if m.on else out

    return Stage(forward, a=lin(), b=lin(), on=on)


def penalty(on: bool, layer: Callable[[], nn.Module]) -> Callable[[], Stage]:
    """Second-order gradients in the forward, as R1 and WGAN-GP have."""

    def forward(m: Any, x: Tensor) -> Tensor:
        out: Tensor = m.b(torch.tanh(m.a(x)))
        if m.on:
            probe = x.detach().requires_grad_()
            value = m.b(torch.tanh(m.a(probe))).sum()
            (slope,) = torch.autograd.grad(value, probe, create_graph=True)
            out = out + slope.pow(2).sum()
        return out

    return lambda: Stage(forward, a=layer(), b=layer(), on=on)


class Reversible(torch.autograd.Function):
    """Module whose backward calls autograd for the weights, as RevNet's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module, *weights: nn.Parameter) -> Tensor:
        ctx.block, ctx.weights = block, weights
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = torch.autograd.grad(ctx.block(x), (x, *ctx.weights), grad)
        return found[0], None, *found[1:]


class Tiled(torch.autograd.Function):
    """Module whose backward runs backwards of its parts, which add to ``.grad`` themselves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([block(part) for part in x.chunk(3)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        found = []
        with torch.enable_grad():
            for part, its in zip(x.chunk(3), grad.chunk(3), strict=True):
                leaf = part.detach().requires_grad_()
                ctx.block(leaf).backward(its)
                found.append(leaf.grad)
        return torch.cat(found), None


def momentum_teacher() -> Stage:
    """A teacher that the forward moves after the student (MoCo, BYOL)."""

    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, its in zip(m.teacher.parameters(), m.a.parameters(), strict=True):
                mine.mul_(0.9).add_(its, alpha=0.1)
            wanted = m.teacher(x)
        return m.a(x) - wanted

    return Stage(forward, a=lin(), teacher=lin().requires_grad_(False))


def optimizer_in_backward() -> Stage:
    made = two()

    def step(parameter: Any) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.01)
        parameter.grad = None

    for parameter in made.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return made


def torchs_optimizer_in_backward() -> Stage:
    from torch.distributed.optim import _apply_optimizer_in_backward

    made = two()
    _apply_optimizer_in_backward(torch.optim.SGD, made.parameters(), {"lr": 0.01})
    return made


def held_accumulators() -> Stage:
    """Hold the nodes that accumulate, as hooks of DistributedDataParallel do."""
    made = two()
    made.nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in made.parameters()]
    made.handles = [
        n.register_hook(lambda *_: setattr(made, "fired", made.fired + 1)) for n in made.nodes
    ]
    made.fired = 0
    return made


def main_grads() -> Stage:
    """Gradients that a hook adds up in float64, as Megatron's recipe does in float32."""
    made = two()

    def hook(parameter: Any) -> None:
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    for parameter in made.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float64)
        parameter.register_post_accumulate_grad_hook(hook)
    return made


def state_outside() -> Stage:
    """State that lies in attributes, lists, generators and globals."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.calls.append(1)
        m.mean.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        noise = torch.rand(x.shape, generator=m.generator) * m.python.random()
        return m.a(x * m.mean + noise) * len(m.calls)

    drawn = {"generator": torch.Generator().manual_seed(3), "python": random.Random(4)}
    return Stage(forward, a=lin(), calls=[], mean=torch.ones(()), **drawn)


def plain_leaves() -> Stage:
    """Tensors with gradients that no module registers: soft prompts, a module in a closure."""
    hidden = [torch.full((WIDTH,), 1.5, requires_grad=True), lin()]
    return Stage(lambda m, x: m.a(x * hidden[0]) + hidden[1](x), a=lin(), hidden=hidden)


def of_plain_leaves(m: Any) -> Extra:
    scale, other = m.hidden
    return {"scale": scale.grad, "weight": other.weight.grad, "bias": other.bias.grad}


def learned_loss(m: Any) -> Callable[[Any, Any], Tensor]:
    return lambda out, target: F.mse_loss(F.linear(out, m.head[0]) * m.head[1], target)


def with_head() -> Stage:
    made = two()
    made.head = [torch.randn(WIDTH, WIDTH, requires_grad=True), nn.Parameter(torch.tensor(1.5))]
    return made


def with_conv_head() -> Stage:
    made = conv()
    made.head = [torch.randn(5, 5, requires_grad=True), torch.tensor(1.5, requires_grad=True)]
    return made


def of_head(m: Any) -> Extra:
    return {"matrix": m.head[0].grad, "scale": m.head[1].grad}


def weight_norm_of_conv(m: Any) -> None:
    parametrizations.weight_norm(m.a)


CASES: dict[str, Callable[[], Case]] = {
    "pruned later": lambda: Case(two, lambda m: prune.l1_unstructured(m.a, "weight", 0.4)),  # type: ignore[attr-defined]
    "weight norm later": lambda: Case(two, lambda m: parametrizations.weight_norm(m.b)),  # type: ignore[arg-type]
    "spectral norm later": lambda: Case(two, lambda m: parametrizations.spectral_norm(m.b)),  # type: ignore[arg-type]
    "convolution reparametrized later": lambda: Case(conv, weight_norm_of_conv, shape=IMAGES),
    "forward replaced later": lambda: Case(two, replace_forward),
    "class replaced later": lambda: Case(two, swap_class),
    "computed weights": lambda: Case(lambda: by_functional_call(True)),
    "computed weights later": lambda: Case(
        lambda: by_functional_call(False), turn_on
    ),
    "tied later": lambda: Case(two, tie),
    "replaced later": lambda: Case(two, new_layer),
    "convolution replaced later": lambda: Case(conv, new_layer, shape=IMAGES),
    "frozen later": lambda: Case(two, freeze),
    "unfrozen later": lambda: Case(lambda: frozen(two()), freeze),
    "convolution frozen later": lambda: Case(conv, freeze, shape=IMAGES),
    "convolution unfrozen later": lambda: Case(
        lambda: frozen(conv()), freeze, shape=IMAGES
    ),
    "hooks later": lambda: Case(two, hook),
    "weight used elsewhere": lambda: Case(lambda: used_elsewhere(True)),
    "weight used elsewhere later": lambda: Case(
        lambda: used_elsewhere(False), turn_on, late_rounds=True
    ),
    "gradient penalty": lambda: Case(penalty(True, lin)),
    "gradient penalty later": lambda: Case(penalty(False, lin), turn_on),
    "gradient penalty of convolutions": lambda: Case(
        penalty(True, lambda: nn.Conv2d(2, 2, 3, padding=1)), shape=IMAGES
    ),
    "clipped embedding": lambda: Case(
        lambda: Stage(
            lambda m, x: m.a(x) + m.e((x[:, :2] > 0).long()).sum(1),
            a=lin(), e=nn.Embedding(2, WIDTH, max_norm=0.5),
        )
    ),
    "reversible": lambda: Case(
        lambda: Stage(
            lambda m, x: Reversible.apply(x, m.a, *m.a.parameters()) + m.b(x), a=two(), b=lin()
        )
    ),
    "tiled": lambda: Case(
        lambda: Stage(lambda m, x: Tiled.apply(x, m.a) + m.b(x), a=two(), b=lin())
    ),
    "momentum teacher": lambda: Case(momentum_teacher),
    "optimizer in backward": lambda: Case(optimizer_in_backward, steps=False, alone=True),
    "torch's optimizer in backward": lambda: Case(
        torchs_optimizer_in_backward, steps=False, alone=True
    ),
    "held accumulators": lambda: Case(
        held_accumulators, extra=lambda m: {"fired": torch.tensor(m.fired)}
    ),
    "main gradients": lambda: Case(
        main_grads, extra=lambda m: {n: p.main_grad for n, p in m.named_parameters()}
    ),
    "state outside": lambda: Case(
        state_outside, alone=True,
        extra=lambda m: {"mean": m.mean, "calls": torch.tensor(len(m.calls))},
    ),
    "leaves outside": lambda: Case(plain_leaves, extra=of_plain_leaves),
    "loss with parameters": lambda: Case(with_head, extra=of_head, loss=learned_loss),
    "loss with parameters, convolutions": lambda: Case(
        with_conv_head, extra=of_head, loss=learned_loss, shape=IMAGES
    ),
}  # fmt: skip


def data(case: Case, iteration: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * iteration + k)
    return torch.randn(case.shape, generator=generator)


@dataclass
class Ran:
    """Results of each iteration, by name."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, case: Case, module: nn.Module, grads: list[Any]) -> None:
        found: dict[str, Any] = {f"input {k}": grad for k, grad in enumerate(grads)}
        found |= {f"gradient of {n}": p.grad for n, p in module.named_parameters()}
        found |= {n: p.detach() for n, p in module.named_parameters()}
        found |= dict(module.named_buffers()) | case.extra(module)
        self.rows.append({n: None if t is None else t.clone() for n, t in found.items()})


def train(case: Case, iterate: Callable[[nn.Module, int], list[Any]], module: nn.Module) -> Ran:
    ran = Ran()
    for iteration in range(ITERATIONS):
        if iteration == 2:
            case.late(module)
        grads = iterate(module, iteration)
        ran.add(case, module, grads)
        with torch.no_grad():
            for parameter in module.parameters() if case.steps else ():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None
    return ran


def made(case: Case) -> nn.Module:
    torch.manual_seed(1)
    module = case.make()
    torch.manual_seed(2)
    return module


def plain(case: Case) -> Ran:
    """A loop without a pipeline."""

    def iterate(module: nn.Module, iteration: int) -> list[Any]:
        grads = []
        for k in range(N):
            x = data(case, iteration, k).requires_grad_()
            out = module(x * 1)
            if case.loss is not None:
                (case.loss(module)(out, data(case, iteration, k + N)) / N).backward()
            else:
                out.backward(data(case, iteration, k + N))
            grads.append(x.grad)
        return grads

    return train(case, iterate, made(case))


def by_runner(case: Case, mode: str) -> tuple[Ran, ModuleRunner]:
    """Run in another op order each iteration."""
    module = made(case)
    loss = None if case.loss is None else case.loss(module)
    runner = ModuleRunner(
        module, is_first=False, is_last=loss is not None, loss_fn=loss, microbatches=N, mode=mode,
    )  # fmt: skip

    def iterate(module: nn.Module, iteration: int) -> list[Any]:
        order = ORDERS[iteration % len(ORDERS)].split()
        if case.alone:
            apart = iteration % 2
            order = [
                f"{op}{k}" for k in range(N) for op in (("F", "B", "W") if apart else ("F", "BW"))
            ]
        runner.begin_iteration(fused={int(op[2:]) for op in order if op.startswith("BW")})
        grads: list[Any] = [None] * N
        for op in order:
            kind, k = op.rstrip("0123456789"), int(op.lstrip("FBW"))
            target = data(case, iteration, k + N)
            if kind == "F":
                runner.run_forward(k, (data(case, iteration, k),), {}, target)
            elif kind == "W":
                runner.backward_weight(k)
            else:
                run = runner.run_fused_backward if kind == "BW" else runner.backward_input
                (grads[k],) = run(k, None if loss is not None else (target,))
        runner.end_iteration()
        return grads

    return train(case, iterate, module), runner


@contextmanager
def builder_of(module: nn.Module) -> Iterator[Any]:
    builder = split_backward(module)
    try:
        yield builder
    finally:
        builder.close()


def by_builder(case: Case) -> Ran:
    """Run as torch's own stage: a forward, then a whole backward behind ``if dw_builder:``."""
    module = made(case)
    with builder_of(module) as builder:

        def iterate(module: nn.Module, iteration: int) -> list[Any]:
            grads, weights, inputs, outputs = [], [], [], []

            def forward() -> None:
                inputs.append(data(case, iteration, len(inputs)).requires_grad_())
                outputs.append(module(inputs[-1]))
                builder.exclude_shared_parameters(outputs)

            for _ in range(0 if case.alone else N):
                forward()
            for k in range(N):
                if case.alone:
                    forward()
                target = data(case, iteration, k + N)
                assert builder
                if case.loss is not None:
                    (case.loss(module)(outputs[k], target) / N).backward()
                else:
                    outputs[k].backward(target)
                weights.append(builder())
                grads.append(inputs[k].grad)
                if case.alone:
                    weights.pop()()
            for run in weights:
                run()
            return grads

        return train(case, iterate, module)


def check(case: Case, want: Ran, got: Ran, what: str) -> None:
    for iteration, (a, b) in enumerate(zip(want.rows, got.rows, strict=True)):
        assert a.keys() == b.keys()
        for name, value in a.items():
            said = f"{what}, iteration {iteration}: {name}"
            assert (value is None) == (b[name] is None), said
            if value is None:
                continue
            if case.late_rounds and iteration >= 2:
                torch.testing.assert_close(value, b[name], rtol=1e-5, atol=1e-6, msg=said)
            else:
                same_bits(b[name], value, said)


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_a_plain_loop_does(name: str) -> None:
    want = plain(CASES[name]())
    for mode in ("auto", "verify"):
        case = CASES[name]()
        got, runner = by_runner(case, mode)
        check(case, want, got, mode)
        assert mode == "auto" or "not all are equal" not in runner.build_report().format_line()
    case = CASES[name]()
    check(case, want, by_builder(case), "split_backward")


def test_a_users_forward_survives() -> None:
    case = CASES["forward replaced later"]()
    _, runner = by_runner(case, "auto")
    assert "forward" in runner.module.b.__dict__  # type: ignore[union-attr]
