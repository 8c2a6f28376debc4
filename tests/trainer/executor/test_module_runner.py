"""ModuleRunner's promises beyond the numbers: order, memory, state, reports, refusals."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from gate import same_bits
from split_support import (
    Job,
    Lambda,
    Result,
    assert_equal,
    output_grads,
    run_order,
    sequential,
    split,
)
from torch import Tensor, nn

from pipemorph_trainer.backward import OpOrderError, SplitError, split_report, stage_measurements
from pipemorph_trainer.executor import module_runner as runner_module
from pipemorph_trainer.executor.module_runner import ModuleRunner
from pipemorph_trainer.torch import split_backward

WIDTH = 8


def batch(k: int = 0) -> tuple[Tensor, ...]:
    return (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(k)),)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, WIDTH), nn.Tanh()
    )


def runner_of(module: nn.Module, microbatches: int = 3, **options) -> ModuleRunner:
    options = {"is_first": False, "is_last": False} | options
    return ModuleRunner(module, microbatches=microbatches, **options)


def iterate(runner: ModuleRunner) -> None:
    """Run every F, then every B, then every W."""
    runner.begin_iteration(fused=frozenset())
    for k in range(runner.microbatches):
        runner.run_forward(k, batch(k))
    for k in range(runner.microbatches):
        runner.backward_input(k, batch(k + 3))
    for k in range(runner.microbatches):
        runner.backward_weight(k)
    runner.end_iteration()


def test_ops_out_of_order_are_refused_by_name() -> None:
    runner = runner_of(mlp())
    with pytest.raises(OpOrderError, match="F1 where F0 is next"):
        runner.run_forward(1, batch())
    with pytest.raises(OpOrderError, match="B0 before F0"):
        runner.backward_input(0, batch())
    runner.run_forward(0, batch())
    with pytest.raises(OpOrderError, match="W0 before B0"):
        runner.backward_weight(0)
    runner.run_forward(1, batch(1))
    runner.backward_input(0, batch())
    with pytest.raises(OpOrderError, match="W1 where W0 is next"):
        runner.backward_weight(1)
    with pytest.raises(OpOrderError, match="W1 where W0 is next"):
        runner.run_fused_backward(1, batch())
    assert runner.in_flight == 2
    runner.backward_weight(0)
    runner.run_fused_backward(1, batch())
    runner.run_forward(2, batch(2))
    with pytest.raises(OpOrderError, match="F3 of 3 microbatches"):
        runner.run_forward(3, batch())
    with pytest.raises(SplitError, match="1 microbatches in flight"):
        runner.begin_iteration(fused=frozenset())
    runner.discard_microbatches()
    assert runner.in_flight == 0
    runner.run_forward(0, batch())


def test_gradients_add_up_over_iterations_and_mixed_orders() -> None:
    torch.manual_seed(0)
    job = Job(mlp(), batch)
    want = sequential(job)
    module = copy.deepcopy(job.module)
    runner = job.runner(module)
    for order in ("F0 BW0 F1 F2 B1 B2 W1 W2", "F0 B0 F1 B1 W0 F2 B2 W1 W2"):
        module.zero_grad()
        got = Result()
        run_order(job, runner, order, got)
        got.grads = {name: p.grad for name, p in module.named_parameters()}
        assert_equal(want, got)
    # A second iteration without zero_grad adds to what is there, as autograd does.
    run_order(job, runner, "F0 F1 F2 B0 B1 B2 W0 W1 W2", Result())
    again = copy.deepcopy(job.module)
    for _ in range(2):
        for k in range(3):
            out = again(*batch(k))
            out.backward(output_grads((out,), k)[0])
    for name, p in again.named_parameters():
        same_bits(p.grad, dict(module.named_parameters())[name].grad, name)


def test_what_is_fused_runs_without_the_split() -> None:
    """Other microbatches of the iteration are split."""
    torch.manual_seed(0)
    job = Job(mlp(), batch)
    got, runner = split(job, "F0 BW0 F1 F2 B1 B2 W1 W2")
    assert_equal(sequential(job), got)
    assert [runner._choose_backward(k) is runner._plain for k in range(3)] == [True, False, False]


def test_input_gradients_do_not_wait_for_w() -> None:
    runner = runner_of(mlp())
    runner.run_forward(0, batch())
    (grad,) = runner.backward_input(0, (batch(1)[0],))
    assert grad is not None
    assert runner.module[0].weight.grad is None
    runner.backward_weight(0)
    assert runner.module[0].weight.grad is not None


class Held:
    """Stands in the graph for one saved tensor, so that its death can be seen."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def test_b_frees_the_activations() -> None:
    runner = runner_of(mlp())
    runner.run_forward(0, batch())  # The first one gets a copy of its input.
    runner.discard_microbatches()
    alive: weakref.WeakSet[Held] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Held:
        held = Held(tensor)
        alive.add(held)
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        runner.run_forward(0, batch())
    assert len(alive) > 4
    output = weakref.ref(runner._flights[0].outputs[0])
    runner.backward_input(0, batch(1))
    gc.collect()
    assert output() is None
    assert len(alive) == 0
    # What W needs is held, and nothing else: x and dy of the two Linears.
    tensors = [t for item in runner._flights[0].work for t in item.operands]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert sum(held.values()) == 4 * 4 * 2 * (WIDTH + 16)
    runner.backward_weight(0)
    gc.collect()
    assert len(alive) == 0


def test_the_stage_stays_what_it_was() -> None:
    module = mlp()
    names = list(module.state_dict())
    runner = runner_of(module)
    runner.run_forward(0, batch())
    assert list(module.state_dict()) == names
    assert type(module[0]) is nn.Linear
    assert "forward" not in module[0].__dict__
    pickle.loads(pickle.dumps(module))
    copy.deepcopy(module)
    module(*batch()).sum().backward()  # outside the runner: plain autograd
    assert module[0].weight.grad is not None
    with torch.no_grad():
        assert not module(*batch()).requires_grad


def test_a_failed_stage_gives_the_functions_back() -> None:
    own, runner = F.linear, runner_of(Lambda(lambda m, x: 1 // 0))
    with pytest.raises(ZeroDivisionError):
        runner.run_forward(0, batch())
    assert F.linear is own


def test_backward_hooks_of_modules_fire_once() -> None:
    module = mlp()
    fired: list[str] = []
    module[0].register_full_backward_hook(lambda *_: fired.append("linear"))
    module[1].register_full_backward_hook(lambda *_: fired.append("norm"))
    runner = runner_of(module)
    runner.run_forward(0, batch())
    runner.backward_input(0, batch(1))
    runner.backward_weight(0)
    assert sorted(fired) == ["linear", "norm"]


def test_a_weight_used_elsewhere_later_on_is_noticed() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.linear(x) * (m.linear.weight.sum() if m.sly else 1)

    module = Lambda(forward, linear=nn.Linear(WIDTH, WIDTH), sly=False)
    runner = runner_of(module)
    for k in range(2):
        runner.run_forward(k, batch())
        runner.run_fused_backward(k, batch(1))
        module.sly = True
    assert runner.build_report().not_deferred == {}
    runner.run_forward(2, batch())
    runner.backward_input(2, batch(1))
    runner.backward_weight(2)
    assert runner._deferring.collector.list_excluded() == {
        "linear.weight": "it is also used in another way",
        "linear.bias": "linear.weight: it is also used in another way",
    }


def test_writing_to_what_w_needs_is_refused_by_name() -> None:
    module = mlp()
    runner = runner_of(module)
    runner.run_forward(0, batch())  # The first one gets a copy of its input.
    runner.discard_microbatches()
    (x,) = batch()
    runner.run_forward(0, (x,))
    runner.backward_input(0, batch(1))
    x.zero_()
    with pytest.raises(SplitError, match=r"input of the call with '0\.weight'"):
        runner.backward_weight(0)


def test_what_cannot_be_sent_is_refused() -> None:
    options = {"is_first": False, "is_last": False, "microbatches": 1}
    with pytest.raises(SplitError, match=r"output\[1\] of the stage is a set"):
        ModuleRunner(Lambda(lambda m, x: (x, {1})), **options).run_forward(0, batch())
    with pytest.raises(SplitError, match="positional argument 0 of a stage is a list"):
        ModuleRunner(nn.Identity(), **options).run_forward(0, ([1],))
    options["is_last"] = True
    with pytest.raises(SplitError, match="the last stage returned"):
        ModuleRunner(nn.Identity(), **options).run_forward(0, batch())
    with pytest.raises(SplitError, match="loss_fn is for the last stage"):
        ModuleRunner(nn.Identity(), **options | {"is_last": False}, loss_fn=F.mse_loss)


def test_wrong_output_gradients_are_refused() -> None:
    runner = runner_of(mlp())
    runner.run_forward(0, batch())
    with pytest.raises(SplitError, match="has 1 outputs; got 2"):
        runner.backward_input(0, (*batch(), *batch()))
    with pytest.raises(SplitError, match=r"output 0 of microbatch 0 has shape \(4, 8\)"):
        runner.backward_input(0, (torch.zeros(3, 8),))


def test_what_a_wrapper_holds_does_not_wait() -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        runner = runner_of(DistributedDataParallel(mlp()))
        iterate(runner)
        assert runner.split == "fused"
        assert (
            "something holds the node that accumulates its gradient"
            in runner.build_report().format_line()
        )
    finally:
        dist.destroy_process_group()


def test_a_sharded_stage_is_split_as_a_plain_one() -> None:
    """Gathered for an iteration, sharded between iterations, with the gradients of a plain one,
    which add up over iterations."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        plain = mlp()
        sharded = copy.deepcopy(plain)
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(sharded[0], mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        first, second = runner_of(plain), runner_of(sharded)
        for iteration in range(2):
            iterate(first)
            iterate(second)
            for (name, one), (_, two) in zip(
                plain.named_parameters(), sharded.named_parameters(), strict=True
            ):
                assert isinstance(two, DTensor), f"{name} is not sharded again"
                assert one.grad is not None and isinstance(two.grad, DTensor), name
                if iteration == 0:
                    same_bits(one.grad, two.grad.full_tensor(), name)
                # Later the sum of an iteration is added to those before it.
                torch.testing.assert_close(one.grad, two.grad.full_tensor())
        assert first.build_report().deferred == second.build_report().deferred != ()
        # A refused iteration has no effect.
        before = [p.grad.full_tensor() for p in sharded.parameters() if p.grad is not None]
        second.begin_iteration(fused=frozenset())
        second.run_forward(0, batch())
        second.discard_microbatches()
        second.end_iteration()
        after = [p.grad.full_tensor() for p in sharded.parameters() if p.grad is not None]
        for old, new in zip(before, after, strict=True):
            same_bits(old, new, "after a refused iteration")
        iterate(second)
    finally:
        dist.destroy_process_group()


def test_a_torch_that_does_not_fit_gets_fused_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (runner_module, split_report):
        monkeypatch.setattr(module, "find_missing_features", lambda: "no hooks to see")
    runner = runner_of(mlp())
    assert runner.split == "fused"
    assert "no hooks to see" in runner.build_report().format_line()


def test_the_report_says_what_waits_and_why_the_rest_does_not() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x, _ = m.recurrent(m.hooked(m.norm(m.linear(x))) @ m.bare)
        return m.twice(x) + x @ m.twice.weight

    module = Lambda(
        forward,
        linear=nn.Linear(WIDTH, WIDTH),
        norm=nn.LayerNorm(WIDTH),
        hooked=nn.Linear(WIDTH, WIDTH),
        bare=nn.Parameter(torch.randn(WIDTH, WIDTH)),
        recurrent=nn.LSTM(WIDTH, WIDTH),
        twice=nn.Linear(WIDTH, WIDTH, bias=False),
        idle=nn.Linear(2, 2, bias=False),
    )
    module.hooked.bias.register_hook(lambda grad: grad)
    runner = runner_of(module)
    assert runner.split == "deferred", "nothing is known yet"
    iterate(runner)
    report = runner.build_report()
    assert report.deferred == ("linear.weight", "linear.bias")
    why = report.not_deferred
    assert why.keys() == dict(module.named_parameters()).keys() - {*report.deferred}
    assert why["norm.weight"] == "of a LayerNorm, in NativeLayerNorm"
    assert why["hooked.bias"] == "it has gradient hooks"
    assert why["hooked.weight"] == "hooked.bias: it has gradient hooks"
    assert why["bare"] == "of a Lambda, in a product such as x @ w"
    assert why["recurrent.weight_hh_l0"] == "of a recurrent layer (LSTM)"
    assert why["twice.weight"] == "it is also used in Mm"
    assert why["idle.weight"] == "of a Linear, without a gradient so far"
    record = report.to_record()
    assert record["split"] == "deferred"
    assert record["parameters"] == sum(p.numel() for p in module.parameters())
    assert record["deferred_share"] == round(72 / record["parameters"], 6)
    assert sum(each["tensors"] for each in record["not_deferred"]) == len(why)
    assert (
        f"defers {72 / record['parameters']:.0%} of the trainable parameters"
        in report.format_line()
    )
    assert "of a recurrent layer (LSTM) (4 tensors, such as recurrent.weight_ih_l0)" in (
        report.format_line()
    )


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (nn.LayerNorm(WIDTH), "fused, no gradient can wait for W"),
        (nn.Tanh(), "fused, nothing is trained"),
    ],
)
def test_a_stage_with_nothing_that_waits_is_fused(module: nn.Module, says: str) -> None:
    runner = runner_of(module)
    iterate(runner)
    assert runner.split == "fused"
    assert says in runner.build_report().format_line()


def test_its_size_does_not_grow_with_the_layers() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH)) for _ in range(40)))
    runner = runner_of(module)
    iterate(runner)
    (group,) = runner.build_report().to_record()["not_deferred"]
    assert (group["tensors"], group["example"]) == (80, "0.0.weight")


def test_sizes_and_times_come_from_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_measurements, "MEASURABLE", 0.0)
    forwards: list[int] = []
    module = mlp()
    module.register_forward_hook(lambda *_: forwards.append(1))
    runner = runner_of(module, microbatches=4)
    assert runner.measured.fused_ratio is None
    for iteration in range(2):
        iterate(runner)
        assert runner.is_measuring == (iteration == 0)
    assert len(forwards) == 8, "no more than those of the training"
    found: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(tensor.untyped_storage().data_ptr())
        sizes[found[-1]] = tensor.untyped_storage().nbytes()
        return tensor

    sizes: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = copy.deepcopy(module)(batch()[0].requires_grad_())
    own = sum(p.nbytes for p in module.parameters())
    assert runner.measured.activation_bytes == sum(sizes.values()) - own - _unsaved(module)
    assert output.requires_grad
    assert runner.measured.input_bytes == batch()[0].nbytes
    assert 0 < (runner.measured.fused_ratio or 0.0) < 100


def _unsaved(module: nn.Module) -> int:
    """Bytes of parameters that no op saves for its backward: biases of Linears."""
    return -sum(m.bias.nbytes for m in module if isinstance(m, nn.Linear))


def test_stage_is_allocated_after_its_runner_was_made() -> None:
    """torchtitan calls ``to_empty`` once it has its schedule, and torch then swaps each parameter,
    which it refuses for one with a weak reference."""
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH, device="meta"))
    users = runner_of(stage), split_backward(stage)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        stage.to_empty(device="cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
        users[1].close()
    assert not any(each.is_meta for each in stage.parameters())
