"""Runs a stage split and unsplit on the same microbatches, for the split backward's tests."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from gate import same_bits
from torch import Tensor, nn

from pipemorph.planning import OpKind
from pipemorph.planning.offload import DeviceResidency
from pipemorph_trainer.backward.stage_measurements import MEASURED
from pipemorph_trainer.executor.module_runner import ModuleRunner
from pipemorph_trainer.memory import ActivationStore

torch.set_num_threads(1)


@dataclass
class Job:
    """A stage and its microbatches. ``args`` of microbatch k are ``make_args(k)``."""

    module: nn.Module
    make_args: Callable[[int], tuple[Any, ...]]
    microbatches: int = 3
    is_first: bool = False
    is_last: bool = False
    loss_fn: Callable[[Any, Any], Tensor] | None = None
    make_target: Callable[[int], Any] = lambda k: None
    mode: str = "auto"
    prepare: Callable[[nn.Module], object] = lambda module: None
    """Done to each copy of the module: hooks and compilation do not survive a copy."""
    offloads: bool = False
    """True if the runner has host memory for activations."""
    recomputes: bool = False
    """True if what exceeds a device limit is computed again."""

    def fresh(self) -> nn.Module:
        module = copy.deepcopy(self.module)
        self.prepare(module)
        return module

    def runner(self, module: nn.Module | None = None) -> ModuleRunner:
        return ModuleRunner(
            module or self.module,
            is_first=self.is_first,
            is_last=self.is_last,
            loss_fn=self.loss_fn,
            microbatches=self.microbatches,
            mode=self.mode,
            store=host_store() if self.offloads else None,
        )


class Lambda(nn.Module):
    """Named children, parameters and values, and a function of them and of the input."""

    def __init__(self, function: Callable[..., Any], **children: Any) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Experts(nn.Module):
    """A mixture of experts as transformers writes it: one after the other, for its own tokens."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 12, 8, dtype=dtype) / 3)
        self.down = nn.Parameter(torch.randn(4, 8, 6, dtype=dtype) / 3)
        self.used = 4

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        chosen = torch.arange(len(x)) % self.used
        for expert in chosen.unique():
            mine = (chosen == expert).nonzero()[:, 0]
            gate, up = nn.functional.linear(x[mine], self.up[expert]).chunk(2, dim=-1)
            found = nn.functional.linear(nn.functional.silu(gate) * up, self.down[expert])
            out.index_add_(0, mine, found.to(out.dtype))
        return out


def host_store(limit: int | None = None) -> ActivationStore:
    return ActivationStore(torch.device("cpu"), limit)


@dataclass
class Result:
    """Results of a run, in the order they came."""

    outputs: list[tuple[Tensor, ...]] = field(default_factory=list)
    input_grads: dict[int, tuple[Tensor | None, ...]] = field(default_factory=dict)
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def output_grads(outputs: Sequence[Tensor], microbatch: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(77 + microbatch)
    return tuple(torch.randn(out.shape, generator=generator).to(out.dtype) for out in outputs)


def sequential(job: Job) -> Result:
    """The reference: F and whole backward of each microbatch in turn, plain autograd."""
    module = job.fresh()
    torch.manual_seed(5)
    result = Result()
    for k in range(job.microbatches):
        args = list(job.make_args(k))
        leaves: list[Tensor | None] = [None] * len(args)
        if not job.is_first:
            for j, arg in enumerate(args):
                if isinstance(arg, Tensor) and arg.is_floating_point():
                    leaves[j] = arg.detach().requires_grad_()
                    # A stage that writes to its input needs a non-leaf; a multiplication
                    # by one changes no bit.
                    args[j] = leaves[j] * 1
        out = module(*args)
        if job.is_last:
            loss = job.loss_fn(out, job.make_target(k)) if job.loss_fn else out
            result.outputs.append((loss.detach(),))
            (loss / job.microbatches).backward()
        else:
            outs = out if isinstance(out, tuple) else (out,)
            result.outputs.append(tuple(o.detach().clone() for o in outs))
            pairs = [
                (o, g) for o, g in zip(outs, output_grads(outs, k), strict=True) if o.requires_grad
            ]
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        result.input_grads[k] = tuple(None if x is None else x.grad for x in leaves)
    _collect(module, result)
    return result


def split(
    job: Job, order: str, *, device_limit: int | None = None, measures: bool = False
) -> tuple[Result, ModuleRunner]:
    """Run ``order``, as in ``"F0 F1 B0 B1 W0 W1"``. ``measures``: as in a first iteration, whose
    backwards are whole and apart in turns."""
    module = job.fresh()
    runner = job.runner(module)
    torch.manual_seed(5)
    result = Result()
    if not measures:
        runner.measured.choose_whole_backwards(MEASURED)
    runner.begin_iteration(fused={int(op[2:]) for op in order.split() if op.startswith("BW")})
    run_order(job, runner, order, result, device_limit)
    assert runner.in_flight == 0
    _collect(module, result)
    return result, runner


def run_order(
    job: Job, runner: ModuleRunner, order: str, result: Result, device_limit: int | None = None
) -> int:
    """Run the ops, offloading or recomputing as a plan with this device limit does; bytes that went
    out."""
    held = DeviceResidency(device_limit)
    moved = 0
    for op in order.split():
        kind, k = op.rstrip("0123456789"), int(op.lstrip("FBW"))
        copies = held.record_op(OpKind(kind), k)
        if kind == "F":
            how = {"recompute" if job.recomputes else "offload": copies}
            outs = runner.run_forward(k, job.make_args(k), {}, job.make_target(k), **how)
            assert all(o.grad_fn is None for o in outs)
            result.outputs.append(tuple(o.clone() for o in outs))
            if copies and not job.recomputes:
                moved += runner.offload_activations(k)
        elif kind == "W":
            runner.backward_weight(k)
        else:
            if copies:
                (runner.recompute_forward if job.recomputes else runner.fetch_activations)(k)
            given = None if job.is_last else output_grads(result.outputs[k], k)
            run = runner.backward_input if kind == "B" else runner.run_fused_backward
            result.input_grads[k] = run(k, given)
    return moved


def _collect(module: nn.Module, result: Result) -> None:
    result.grads = {n: p.grad for n, p in module.named_parameters()}
    result.buffers = {n: b.clone() for n, b in module.named_buffers()}


def assert_equal(want: Result, got: Result) -> None:
    """Bitwise: outputs, input gradients, parameter gradients and buffers."""
    for k, (a, b) in enumerate(zip(want.outputs, got.outputs, strict=True)):
        for x, y in zip(a, b, strict=True):
            same_bits(x, y, f"output of microbatch {k}")
    for k, a in want.input_grads.items():
        for j, (x, y) in enumerate(zip(a, got.input_grads[k], strict=True)):
            _same(x, y, f"input gradient {j} of microbatch {k}")
    assert want.grads.keys() == got.grads.keys()
    for name, x in want.grads.items():
        _same(x, got.grads[name], f"gradient of {name}")
    for name, x in want.buffers.items():
        _same(x, got.buffers[name], f"buffer {name}")


def _same(x: Tensor | None, y: Tensor | None, what: str) -> None:
    assert (x is None) == (y is None), f"{what}: {x is None} {y is None}"
    if x is not None and y is not None:
        assert x.dtype == y.dtype, what
        same_bits(x, y, what)


def random_order(microbatches: int, rng: random.Random) -> str:
    """Draw an order with each kind in microbatch order and F before B before W."""
    done = {"F": 0, "B": 0, "W": 0}
    ops = []
    while done["W"] < microbatches:
        able = [
            kind
            for kind, limit in (("F", microbatches), ("B", done["F"]), ("W", done["B"]))
            if done[kind] < limit
        ]
        kind = rng.choice(able)
        ops.append(f"{kind}{done[kind]}")
        done[kind] += 1
    return " ".join(ops)
