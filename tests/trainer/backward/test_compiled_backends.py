"""Blocks compiled with the backends of the trainer leave the weight gradients to W that they would
leave uncompiled, and every gradient has the bits of torch's own backend."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from launch import run_ranks
from pairwise import give_tiers
from split_support import Job, Lambda, Result, assert_equal, output_grads, sequential, split
from test_split_zoo import DELAYED, Block
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from pipemorph_trainer import Pipeline, TrainerContext
from pipemorph_trainer.backward.compiled import backends, compiler_internals
from pipemorph_trainer.backward.microbatch_state import run_weight_work
from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.module_runner import ModuleRunner
from pipemorph_trainer.topology.mesh import join_process_group

WHOLE = "F0 F1 F2 BW0 BW1 BW2"
WIDTH = 16
OF_TORCH = {"pipemorph": "inductor", "pipemorph_aot_eager": "aot_eager"}
INDUCTOR = [pytest.mark.soak, pytest.mark.timeout(600)]
SLOW = pytest.mark.timeout(600)
"""A machine without a warm cache compiles C++ for a minute."""


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def vectors(k: int, length: int = 6) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(k)
    return (torch.randn(3, length, WIDTH, generator=generator),)


def longer(k: int) -> tuple[Tensor, ...]:
    return vectors(k, 6 + 2 * k)


def block(dropout: float = 0.0) -> Block:
    return Block(WIDTH, dropout)


def linears(names: str) -> dict[str, nn.Module]:
    return {name: nn.Linear(WIDTH, WIDTH) for name in names}


def twice() -> nn.Module:
    """Model with one Linear used twice, and two that get the same gradient."""
    return Lambda(lambda m, x: m.b(m.a(m.a(x).tanh())) + m.c(x), **linears("abc"))


def in_bfloat16(m: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.block(x).float()


def around(reentrant: bool) -> nn.Module:
    """Checkpoints its block from outside of the compiled part."""
    return Lambda(
        lambda m, x: checkpoint(m.block, x, use_reentrant=reentrant), block=block(dropout=0.5)
    )


def shared() -> nn.Module:
    """Model with the same block twice in a row, after another one: they share their code."""
    return Lambda(lambda m, x: m.b(m.b(m.a(x))), a=block(), b=block())


def broken() -> nn.Module:
    """Compiled module of two graphs."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = m.a(x).tanh()
        torch._dynamo.graph_break()
        return m.b(x)

    return Lambda(forward, **linears("ab"))


def job_of(case: Case, backend: str) -> Job:
    torch.manual_seed(3)
    return Job(
        case.module(),
        case.make_args,
        is_first=case.is_first,
        prepare=lambda stage: case.prepare(stage, backend) if backend else None,
    )


def compiled(kind: type, **options: object) -> Callable[[nn.Module, str], None]:
    def prepare(stage: nn.Module, backend: str) -> None:
        for module in stage.modules():
            if isinstance(module, kind):
                module.compile(backend=backend, **options)

    return prepare


@dataclass
class Case:
    module: Callable[[], nn.Module]
    prepare: Callable[[nn.Module, str], None] = field(default=compiled(Block))
    make_args: Callable[[int], tuple[Tensor, ...]] = vectors
    is_first: bool = False
    more: bool = False
    """True if more waits than without compilation."""
    rounds: bool = False
    """True if inductor's halves round elsewhere than its whole backward."""


CASES = {
    "checkpoint inside": Case(lambda: around(False), compiled(Lambda)),
    "two blocks": Case(lambda: nn.Sequential(block(), block())),
    "checkpoint outside": Case(lambda: around(False)),
    "checkpoint outside, reentrant": Case(lambda: around(True)),
    "dropout": Case(lambda: block(dropout=0.5)),
    "Linear used twice": Case(twice, compiled(Lambda)),
    "block used twice, shared code": Case(shared),
    "dynamic shapes": Case(block, compiled(Block, dynamic=True), longer),
    "shapes that change": Case(block, compiled(Block), longer),
    "no gradient for the input": Case(block, is_first=True),
    "no norm, no gradient for the input": Case(twice, compiled(Lambda), is_first=True),
    "BatchNorm": Case(
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(6 * WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        ),
        compiled(nn.Sequential),
    ),
    "graph break": Case(
        broken,
        lambda stage, backend: stage.compile(backend=backend),
    ),
    "in an uncompiled stage": Case(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), block(), nn.Linear(WIDTH, WIDTH))
    ),
    "multi-head attention": Case(
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True),
        compiled(nn.TransformerEncoderLayer),
        more=True,
        rounds=True,
    ),
}


def assert_close(want: Result, got: Result, tolerance: float) -> None:
    """Gradients within the tolerance, relative to a tensor's largest element."""
    for name, grad in want.grads.items():
        allowed = tolerance * float(grad.abs().max())
        torch.testing.assert_close(got.grads[name], grad, rtol=0, atol=allowed)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *give_tiers([(name, "pipemorph_aot_eager") for name in CASES], test=2, full=len(CASES) - 2),
        *(pytest.param(name, "pipemorph", marks=INDUCTOR) for name in CASES),
    ],
)
def test_a_compiled_block_defers_what_it_would_uncompiled(name: str, backend: str) -> None:
    case = CASES[name]
    want = sequential(job_of(case, OF_TORCH[backend]))
    got, runner = split(job_of(case, backend), DELAYED)
    report = runner.build_report()
    text = "\n".join(report.format_lines())
    assert report.split == "deferred", text
    if case.rounds and backend == "pipemorph":
        assert_close(want, got, 1e-5)
        assert report.notes, text
        # Bits from now on are those that every plan gives.
        want = got
    assert_equal(want, got)
    _, plain = split(job_of(case, ""), DELAYED)
    assert set(report.deferred) >= set(plain.build_report().deferred), text
    for order in ("F0 B0 F1 B1 W0 F2 B2 W1 W2", WHOLE):
        again, _ = split(job_of(case, backend), order)
        assert_equal(want, again)


@pytest.mark.full
@SLOW
def test_inductor_defers_what_the_block_would_uncompiled() -> None:
    """`make test` runs only this of the above for inductor."""
    stage = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))  # noqa: E731
    case = Case(stage, compiled(nn.Sequential))
    want = sequential(job_of(case, "inductor"))
    got, runner = split(job_of(case, "pipemorph"), DELAYED)
    assert runner.build_report().deferred_share == 1.0, runner.build_report().format_lines()
    (note,) = runner.build_report().notes
    assert "gradients may differ by 1e-05" in note
    assert_equal(want, got)


@pytest.mark.soak
@SLOW
def test_bf16_differs_at_most_by_rounding_and_then_in_every_plan_alike() -> None:
    case = Case(lambda: Lambda(in_bfloat16, block=block()), compiled(Lambda))
    want = sequential(job_of(case, "inductor"))
    got, runner = split(job_of(case, "pipemorph"), DELAYED)
    assert runner.build_report().deferred_share > 0.9, runner.build_report().format_lines()
    assert_close(want, got, 1e-2)
    again, fused = split(job_of(case, "pipemorph"), WHOLE)
    assert_equal(got, again)
    fused.begin_iteration(fused={0})
    assert fused._choose_backward(0) is fused._deferring


def test_optimized_module_and_name_of_backend() -> None:
    """torch.compile(block) in place of block.compile()."""
    stage = nn.Sequential(torch.compile(block(), backend="pipemorph_aot_eager"), nn.Tanh())
    _, runner = split(Job(stage, vectors), DELAYED)
    assert "0._orig_mod.attention.qkv.weight" in runner.build_report().deferred, (
        runner.build_report().format_lines()
    )


def test_code_that_dynamo_gives_up_is_named() -> None:
    """A break in a loop: the stage runs as if it were not compiled."""
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), broken())
    job = Job(stage, vectors, prepare=lambda m: m.compile(backend="pipemorph_aot_eager"))
    want = sequential(job)
    got, runner = split(job, DELAYED)
    assert_equal(want, got)
    assert runner.build_report().deferred_share == 1.0, runner.build_report().format_lines()


def test_another_backend_is_named() -> None:
    stage = nn.Sequential(block(), nn.Linear(WIDTH, WIDTH))
    _, runner = split(Job(stage, vectors, prepare=lambda m: m[0].compile(backend="eager")), DELAYED)
    assert "0.attention.qkv.weight" in runner.build_report().not_deferred
    assert 'compiled, not with backend="pipemorph"' in runner.build_report().format_line()


def test_without_a_private_name_the_backward_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    job = Job(block(), vectors, prepare=lambda m: m.compile(backend="pipemorph_aot_eager"))
    want = sequential(job)
    torch._dynamo.reset()
    monkeypatch.delattr(torch._C, "_current_autograd_node")
    compiler_internals.find_missing_features.cache_clear()
    try:
        got, runner = split(job, DELAYED)
        line = runner.build_report().format_line()
    finally:
        compiler_internals.find_missing_features.cache_clear()
    assert runner.split == "fused"
    assert "this version of torch is not supported" in line
    assert "_current_autograd_node" in line
    assert_equal(want, got)


def test_a_hooked_or_tied_weight_keeps_its_whole_region_in_b() -> None:
    calls: list[Tensor] = []

    def prepare(stage: nn.Module) -> None:
        compiled(Block)(stage, "pipemorph_aot_eager")
        stage[0].mlp[0].weight.register_post_accumulate_grad_hook(calls.append)

    torch.manual_seed(3)
    stage = nn.Sequential(block(), block())
    job = Job(stage, vectors, prepare=prepare)
    want = sequential(job)
    assert len(calls) == 3
    got, runner = split(job, DELAYED)
    assert_equal(want, got)
    report = runner.build_report()
    assert "1.mlp.0.weight" in report.deferred
    why = report.not_deferred
    hooked = "in compiled code with 0.mlp.0.weight: it has gradient hooks"
    assert why["0.mlp.0.weight"] == why["0.attention.qkv.weight"] == hooked


def test_a_write_between_b_and_w_is_an_error() -> None:
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    stage.compile(backend="pipemorph_aot_eager")
    runner = ModuleRunner(stage, is_first=False, is_last=False, microbatches=1)
    (x,) = vectors(0)
    (out,) = runner.run_forward(0, (x,))
    grad = torch.ones_like(out)
    runner.backward_input(0, (grad,))
    grad.zero_()
    with pytest.raises(SplitError, match=r"compiled code of '0\.weight' needs in W was written in"):
        runner.backward_weight(0)


def test_weights_with_one_gradient_do_not_share_it() -> None:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    for _ in range(2):
        run_weight_work([backends.CompiledWork(lambda _: [torch.ones(2)] * 2, [], weights, [])])
    assert all(torch.equal(weight.grad, torch.full((2,), 2.0)) for weight in weights)


def test_b_keeps_only_what_products_need() -> None:
    """Activations that no weight gradient needs are freed by B, as in an uncompiled stage."""
    held: dict[str, int] = {}
    for backend in ("", "pipemorph_aot_eager"):
        stage = block()
        if backend:
            stage.compile(backend=backend)
        runner = ModuleRunner(stage, is_first=False, is_last=False, microbatches=1)
        (out,) = runner.run_forward(0, vectors(0))
        runner.backward_input(0, output_grads([out], 0))
        tensors = [
            value
            for item in runner._flights[0].work
            for value in (item.operands if not backend else item._held)
            if isinstance(value, Tensor)
        ]
        held[backend] = sum(
            {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
        )
    assert held["pipemorph_aot_eager"] <= 1.1 * held[""]


@pytest.mark.full
def test_activations_of_compiled_blocks_go_to_host_memory_and_back() -> None:
    prepare = lambda m: compiled(Block)(m, "pipemorph_aot_eager")  # noqa: E731
    torch.manual_seed(3)
    job = Job(nn.Sequential(block(), block()), vectors, prepare=prepare, offloads=True)
    want = sequential(job)
    got, _ = split(job, "F0 F1 F2 B0 B1 W0 B2 W1 W2", device_limit=1)
    assert_equal(want, got)
    # The first microbatches on the device are measured and tried: with the limit there is one.
    tried, runner = split(job, DELAYED)
    assert_equal(want, tried)
    assert 0 < runner.measured.copied_bytes <= runner.measured.activation_bytes


def test_a_compiled_function_around_a_linear_defers_it() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        run = torch.compile(lambda y: m.a(y).tanh(), backend="pipemorph_aot_eager")
        return m.b(run(x))

    job = Job(Lambda(forward, **linears("ab")), vectors)
    want = sequential(job)
    got, runner = split(job, DELAYED)
    assert_equal(want, got)
    assert runner.build_report().deferred == ("a.weight", "a.bias", "b.weight", "b.bias")


@pytest.mark.full
def test_evaluation_between_iterations() -> None:
    stage = block()
    stage.compile(backend="pipemorph_aot_eager")
    reference = copy.deepcopy(stage)
    runner = ModuleRunner(stage, is_first=False, is_last=False, microbatches=1)
    for _ in range(2):
        (out,) = runner.run_forward(0, vectors(0))
        runner.backward_input(0, output_grads([out], 0))
        runner.backward_weight(0)
        (evaluated,) = runner.evaluate_microbatch(0, vectors(0))
        assert torch.equal(evaluated, reference(*vectors(0)))


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_verify_compares_the_halves_with_the_whole(factor: float) -> None:
    right = backends.CompiledWork.compute_gradients

    def wrong(work: backends.CompiledWork) -> list[Tensor]:
        return [grad * factor for grad in right(work)]

    prepare = lambda m: m.compile(backend="pipemorph_aot_eager")  # noqa: E731
    job = Job(block(), vectors, prepare=prepare, mode="verify")
    with patch.object(backends.CompiledWork, "compute_gradients", wrong):
        _, runner = split(job, DELAYED)
    says = (
        "not all are equal" if factor > 1 else "gradients were compared with those of the original"
    )
    assert says in runner.build_report().format_line(), runner.build_report().format_lines()
    assert ("of the compiled code with" in runner.build_report().format_line()) == (factor > 1)


def sharded_stage(backend: str) -> nn.Module:
    torch.manual_seed(3)
    stage = nn.Sequential(block(), block())
    if backend:
        compiled(Block)(stage, backend)
    for each in stage:
        fully_shard(each)
    fully_shard(stage)
    return stage


def train_sharded(context: TrainerContext) -> dict[str, tuple[list[str], list[str]]]:
    """Train, and return what is deferred and the report, by backend."""
    join_process_group(context, torch.device("cpu"))
    found = {}
    wanted: list[Tensor] = []
    for backend in ("aot_eager", "pipemorph_aot_eager"):
        stage = sharded_stage(backend)
        runner = ModuleRunner(stage, is_first=False, is_last=False, microbatches=2)
        for iteration in range(3):
            stage.zero_grad()
            runner.begin_iteration(fused=set() if iteration == 1 else {0, 1})
            for k in range(2):
                runner.run_forward(k, vectors(2 * context.rank + k))
            for k in range(2):
                grad = torch.ones(vectors(k)[0].shape)
                if iteration == 1:
                    runner.backward_input(k, (grad,))
                else:
                    runner.run_fused_backward(k, (grad,))
            for k in range(2 if iteration == 1 else 0):
                runner.backward_weight(k)
            runner.end_iteration()
            grads = [p.grad.full_tensor() for p in stage.parameters()]
            wanted = wanted or grads
            assert all(torch.equal(a, b) for a, b in zip(wanted, grads, strict=True)), iteration
            found[backend] = (
                list(runner.build_report().deferred),
                runner.build_report().format_lines(),
            )
    return found


@pytest.mark.full
def test_fully_shard_around_compiled_blocks() -> None:
    for found in run_ranks(2, train_sharded):
        assert not found["aot_eager"][0]
        deferred, text = found["pipemorph_aot_eager"]
        assert {"0.attention.qkv.weight", "1.mlp.2.weight"} <= set(deferred), text


def mlp() -> nn.Module:
    up, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
    return Lambda(lambda m, x: m.down(F.gelu(m.up(x))), up=up, down=down)


def train_spread(context: TrainerContext) -> list[str]:
    """Train two stages, each with a Linear and a compiled block that is spread over two ranks.
    Checks losses and gradients against both stages on this rank alone. Returns the report."""
    join_process_group(context, torch.device("cpu"))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    torch.manual_seed(3)
    whole = nn.Sequential(*(nn.Sequential(mlp(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)))
    at = mesh.get_local_rank("pp")
    stage = copy.deepcopy(whole[at])
    parallelize_module(stage[0], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    stage[0].compile(backend="pipemorph_aot_eager")
    x, target = torch.cat([vectors(0)[0], vectors(1)[0]]), torch.cat([vectors(2)[0], vectors(3)[0]])
    with Pipeline(
        stage, context=context, mesh=mesh, loss_fn=F.mse_loss, microbatches=2,
        policy="zero-bubble", deadline_seconds=120,
    ) as pipe:  # fmt: skip
        for _ in range(3):
            stage.zero_grad()
            whole.zero_grad()
            loss = pipe.step(x, target=target)
            wanted = F.mse_loss(whole(x), target)
            wanted.backward()
            assert loss == pytest.approx(float(wanted), rel=1e-5)
            for mine, its in zip(stage.parameters(), whole[at].parameters(), strict=True):
                assert mine.grad is not None and its.grad is not None
                grad = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
                torch.testing.assert_close(grad, its.grad)
        (own,) = pipe._parts.stages.values()
        assert isinstance(own.runner, ModuleRunner)
        report = own.runner.build_report()
    assert report.deferred and all(name.startswith("1.") for name in report.deferred)
    return report.format_lines()


@pytest.mark.full
@SLOW
def test_a_compiled_block_of_tensor_parallel_ranks_keeps_its_backward_whole() -> None:
    """The report says why. The Linear in the same stage is deferred all the same."""
    for lines in run_ranks(4, train_spread, timeout=400):
        text = "\n".join(lines)
        assert "its compiled code has DTensors" in text, text
