"""StageRunner's promises beyond the numbers: order, memory, state, reports, refusals."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import random
import weakref

import pytest
import torch
import torch.nn.functional as F
from gate import same_bits
from split_support import Job, Result, assert_equal, output_grads, run_order, sequential, split
from torch import Tensor, nn

from pipemorph_trainer.executor.split import OrderError, Sample, SplitError, StageRunner

WIDTH = 8


def batch(k: int = 0) -> tuple[Tensor, ...]:
    return (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(k)),)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, WIDTH), nn.Tanh()
    )


def runner_of(module: nn.Module, microbatches: int = 3, **options) -> StageRunner:
    options = {"is_first": False, "is_last": False} | options
    runner = StageRunner(module, microbatches=microbatches, **options)
    runner.self_test([Sample(batch(k), target=torch.zeros(())) for k in range(2)])
    return runner


def test_ops_out_of_order_are_refused_by_name() -> None:
    runner = runner_of(mlp())
    with pytest.raises(OrderError, match="F1 where F0 is next"):
        runner.forward(1, batch())
    with pytest.raises(OrderError, match="B0 before F0"):
        runner.backward_input(0, batch())
    runner.forward(0, batch())
    with pytest.raises(OrderError, match="W0 before B0"):
        runner.backward_weight(0)
    runner.forward(1, batch(1))
    runner.backward_input(0, batch())
    with pytest.raises(OrderError, match="W1 where W0 is next"):
        runner.backward_weight(1)
    with pytest.raises(OrderError, match="W1 where W0 is next"):
        runner.backward(1, batch())
    assert runner.in_flight == 2
    runner.backward_weight(0)
    runner.backward(1, batch())
    runner.forward(2, batch(2))
    with pytest.raises(OrderError, match="F3 of 3 microbatches"):
        runner.forward(3, batch())
    with pytest.raises(SplitError, match="1 microbatches in flight"):
        runner.self_test([Sample(batch())])
    runner.discard()
    assert runner.in_flight == 0
    runner.forward(0, batch())


def test_gradients_add_up_over_iterations_and_mixed_orders() -> None:
    torch.manual_seed(0)
    job = Job(mlp(), batch)
    want = sequential(job)
    module = copy.deepcopy(job.module)
    runner = job.runner(module)
    runner.self_test([Sample(batch())])
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
    """In an iteration in which other microbatches are split."""
    torch.manual_seed(0)
    job = Job(mlp(), batch)
    got, runner = split(job, "F0 BW0 F1 F2 B1 B2 W1 W2")
    assert_equal(sequential(job), got)
    assert [runner._splits(k).split for k in range(3)] == ["fused", "module", "module"]


@pytest.mark.parametrize("mode", ["module", "graph", "fused"])
def test_every_mode_gives_the_same_bits(mode: str) -> None:
    torch.manual_seed(0)
    job = Job(
        mlp(),
        batch,
        is_last=True,
        loss_fn=F.mse_loss,
        make_target=lambda k: batch(k + 9)[0],
        mode=mode,
    )
    got, runner = split(job, "F0 F1 F2 B0 B1 W0 B2 W1 W2")
    assert runner.split == mode
    assert_equal(sequential(job), got)


@pytest.mark.parametrize("mode", ["module", "graph"])
def test_input_gradients_do_not_wait_for_w(mode: str) -> None:
    runner = runner_of(mlp(), mode=mode)
    runner.forward(0, batch())
    (grad,) = runner.backward_input(0, (batch(1)[0],))
    assert grad is not None
    assert runner.module[0].weight.grad is None
    runner.backward_weight(0)
    assert runner.module[0].weight.grad is not None


class Held:
    """Stands in the graph for one saved tensor, so that its death can be seen."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


@pytest.mark.parametrize(("mode", "frees"), [("module", True), ("graph", False)])
def test_a_module_split_frees_the_activations_at_b(mode: str, frees: bool) -> None:
    runner = runner_of(mlp(), mode=mode)
    alive: weakref.WeakSet[Held] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Held:
        held = Held(tensor)
        alive.add(held)
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        runner.forward(0, batch())
    assert len(alive) > 4
    output = weakref.ref(runner._flights[0].outputs[0])
    runner.backward_input(0, batch(1))
    gc.collect()
    assert output() is None
    if frees:
        assert len(alive) == 0
        # What W needs is kept, and nothing else: x and dy of the two Linears.
        work = runner._flights[0].work
        tensors = [t for item in work for t in (item.x, item.grad, item.bias_grad)]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        assert sum(held.values()) == 4 * 4 * 2 * (WIDTH + 16)
    else:
        assert len(alive) > 4
    runner.backward_weight(0)
    gc.collect()
    assert len(alive) == 0


def test_self_test_leaves_no_trace() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.norm = nn.BatchNorm1d(WIDTH)
            self.drop = nn.Dropout(0.5)
            self.step = 3

        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            self.last = x
            random.random()
            return self.drop(self.norm(self.linear(x)))

    module = Stateful()
    module.linear.weight.grad = torch.ones(WIDTH, WIDTH)
    grad = module.linear.weight.grad
    state = copy.deepcopy(module.state_dict())
    buffers = dict(module.named_buffers())
    args = batch()
    before = args[0].clone()
    torch.manual_seed(4)
    random.seed(4)
    runner = runner_of(module)
    same_bits(torch.rand(5), _after_seed(4))
    assert random.random() == random.Random(4).random()
    assert runner.split == "module"
    assert module.step == 3
    assert not hasattr(module, "last")
    assert module.linear.weight.grad is grad
    same_bits(grad, torch.ones(WIDTH, WIDTH))
    assert module.linear.bias.grad is None
    same_bits(args[0], before)
    for name, value in module.state_dict().items():
        same_bits(value, state[name], name)
    for name, buffer in module.named_buffers():
        assert buffer is buffers[name]


def _after_seed(seed: int) -> Tensor:
    return torch.rand(5, generator=torch.Generator().manual_seed(seed))


def test_the_stage_stays_what_it_was() -> None:
    module = mlp()
    names = list(module.state_dict())
    runner = runner_of(module)
    runner.forward(0, batch())
    assert list(module.state_dict()) == names
    assert type(module[0]) is nn.Linear
    assert "forward" not in module[0].__dict__
    pickle.loads(pickle.dumps(module))
    copy.deepcopy(module)
    module(*batch()).sum().backward()  # outside the runner: plain autograd
    assert module[0].weight.grad is not None
    with torch.no_grad():
        assert not module(*batch()).requires_grad


def test_a_failed_stage_is_put_back() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.fail = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            if self.fail:
                raise ValueError("my own")
            return x

    module = Fails()
    runner = runner_of(module)
    module.fail = True
    with pytest.raises(ValueError, match="my own"):
        runner.forward(0, batch())
    assert "forward" not in module.linear.__dict__
    report = runner.self_test([Sample(batch())])
    assert (report.split, report.tested) == ("fused", False)
    assert "could not run the stage: ValueError: my own" in report.line()
    module.fail = False
    runner.forward(0, batch())


def test_backward_hooks_of_modules_fire_once_in_a_module_split() -> None:
    module = mlp()
    fired: list[str] = []
    module[0].register_full_backward_hook(lambda *_: fired.append("linear"))
    module[1].register_full_backward_hook(lambda *_: fired.append("norm"))
    runner = runner_of(module)
    assert runner.split == "module"
    fired.clear()
    runner.forward(0, batch())
    runner.backward_input(0, batch(1))
    runner.backward_weight(0)
    assert sorted(fired) == ["linear", "norm"]


def test_a_hook_added_later_fires_and_ends_the_deferral() -> None:
    module = mlp()
    runner = runner_of(module)
    fired: list[Tensor] = []
    module[0].weight.register_hook(fired.append)
    runner.forward(0, batch())
    runner.backward_input(0, batch(1))
    assert len(fired) == 1
    assert module[0].weight.grad is not None


def test_a_weight_used_elsewhere_later_on_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    class Sly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.sly = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return y * self.linear.weight.sum() if self.sly else y

    module = Sly()
    runner = runner_of(module)
    module.sly = True
    with caplog.at_level(logging.WARNING):
        runner.forward(0, batch())
        runner.backward(0, batch(1))
    assert "linear.weight is also used outside its own Linear" in caplog.text
    runner.forward(1, batch())
    runner.backward_input(1, batch(1))
    assert module.linear.bias.grad is not None


def test_writing_to_what_w_needs_is_refused_by_name() -> None:
    module = mlp()
    runner = runner_of(module)
    (x,) = batch()
    runner.forward(0, (x,))
    runner.backward_input(0, batch(1))
    x.zero_()
    with pytest.raises(SplitError, match="input of '0'"):
        runner.backward_weight(0)


def test_a_split_that_was_asked_for_and_cannot_be_raises() -> None:
    options = {"is_first": False, "is_last": False, "microbatches": 2}
    with pytest.raises(SplitError, match=r"'module' is not possible: .*LayerNorm"):
        StageRunner(nn.LayerNorm(WIDTH), mode="module", **options)
    with pytest.raises(SplitError, match=r"'graph' is not possible: the stage has no trainable"):
        StageRunner(nn.Identity(), mode="graph", **options)
    compiled = torch.compile(mlp(), backend="eager")
    for mode in ("graph", "module"):
        with pytest.raises(SplitError, match=r"is not possible: .*the stage is compiled"):
            StageRunner(compiled, mode=mode, **options)


def test_what_cannot_be_sent_is_refused() -> None:
    options = {"is_first": False, "is_last": False, "microbatches": 1}
    with pytest.raises(SplitError, match=r"output\[1\] of the stage is a set"):
        StageRunner(_Returns((torch.zeros(1), {1})), **options).forward(0, batch())
    with pytest.raises(SplitError, match="positional argument 0 of a stage is a list"):
        StageRunner(nn.Identity(), **options).forward(0, ([1],))
    options["is_last"] = True
    with pytest.raises(SplitError, match="the last stage returned"):
        StageRunner(nn.Identity(), **options).forward(0, batch())
    with pytest.raises(SplitError, match="loss_fn is for the last stage"):
        StageRunner(nn.Identity(), **options | {"is_last": False}, loss_fn=F.mse_loss)


class _Returns(nn.Module):
    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> object:
        return self.value


def test_wrong_output_gradients_are_refused() -> None:
    runner = runner_of(mlp())
    runner.forward(0, batch())
    with pytest.raises(SplitError, match="has 1 outputs; got 2"):
        runner.backward_input(0, (*batch(), *batch()))
    with pytest.raises(SplitError, match=r"output 0 of microbatch 0 has shape \(4, 8\)"):
        runner.backward_input(0, (torch.zeros(3, 8),))


def test_a_stage_that_cannot_repeat_itself_is_named() -> None:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            seed = _COUNTER.__next__()
            noise = torch.rand(1, generator=torch.Generator().manual_seed(seed)) * 1e-5
            return self.norm(self.linear(x)) * (1 + noise)

    import itertools

    _COUNTER = itertools.count()
    runner = runner_of(Noise())
    assert runner.report is not None
    assert "the gradient of 'norm.weight'" in runner.report.irreproducible
    assert runner.split == "module"


def test_a_wrapper_that_hooks_gradients_is_refused_by_name() -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        runner = runner_of(DistributedDataParallel(mlp()))
        assert runner.split == "fused"
        assert "is a DistributedDataParallel, which acts on gradients" in runner.reason
        runner.forward(0, batch())
        runner.backward_input(0, batch(1))
        runner.backward_weight(0)
    finally:
        dist.destroy_process_group()


def test_a_sharded_stage_is_split_as_a_plain_one() -> None:
    """Gathered for an iteration, sharded between iterations, with the gradients of a plain one,
    which add up over iterations."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    def iterate(runner: StageRunner) -> None:
        runner.begin_iteration(fused=frozenset())
        for k in range(3):
            runner.forward(k, batch(k))
        for k in range(3):
            runner.backward_input(k, batch(k + 3))
        for k in range(3):
            runner.backward_weight(k)
        runner.end_iteration()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        plain = mlp()
        sharded = copy.deepcopy(plain)
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(sharded[0], mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        first, second = runner_of(plain), runner_of(sharded)
        assert first.split == second.split == "module"
        assert first.report is not None and second.report is not None
        assert first.report.deferred == second.report.deferred
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
        # A refused iteration leaves no trace.
        before = [p.grad.full_tensor() for p in sharded.parameters() if p.grad is not None]
        second.begin_iteration(fused=frozenset())
        second.forward(0, batch())
        second.discard()
        second.end_iteration()
        after = [p.grad.full_tensor() for p in sharded.parameters() if p.grad is not None]
        for old, new in zip(before, after, strict=True):
            same_bits(old, new, "after a refused iteration")
        iterate(second)
    finally:
        dist.destroy_process_group()


def test_a_torch_that_does_not_fit_gets_fused_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipemorph_trainer.executor.split import self_test

    monkeypatch.setattr(self_test, "missing", lambda: "no hooks to see")
    runner = runner_of(mlp())
    assert runner.split == "fused"
    assert "no hooks to see" in runner.reason


def test_a_graph_split_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipemorph_trainer.executor.split import self_test

    monkeypatch.setattr(self_test, "MEASURABLE", 0.0)
    for most, wanted in ((1e9, "graph"), (0.0, "fused")):
        monkeypatch.setattr(self_test, "MAX_OVERHEAD", most)
        runner = runner_of(nn.LayerNorm(WIDTH))
        assert runner.split == wanted, runner.reason
    assert "times the unsplit backward" in runner.reason


def test_report_has_times_bytes_and_a_line_for_people() -> None:
    report = runner_of(mlp()).report
    assert report is not None
    assert report.times.forward > 0
    assert report.times.backward_weight > 0
    assert 0 < report.times.weight_fraction < 1
    assert report.activation_bytes is not None
    # x and two hidden activations (LayerNorm keeps its statistics too) and the output
    assert report.activation_bytes >= 4 * 4 * (WIDTH + 3 * 16)
    assert report.lines()[0].startswith("split backward: module")
