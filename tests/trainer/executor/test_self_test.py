"""What the self-test runs a stage on, what it needs for that, and what it says."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from gate import same_bits
from split_support import Job, Result, assert_equal, output_grads, run_order, sequential
from test_offload_store import Storages
from torch import Tensor, nn

from pipemorph.errors import InputError
from pipemorph_trainer.executor.local_stage import mode_of
from pipemorph_trainer.executor.split import SplitReport, StageRunner, deferred, self_test
from pipemorph_trainer.executor.split.digest import CHUNK, Digest
from pipemorph_trainer.executor.split.trial import Outcome

WIDTH = 8


def batch(k: int) -> tuple[Tensor, ...]:
    return (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(k)),)


def runner_of(module: nn.Module, microbatches: int = 3, **options: Any) -> StageRunner:
    return StageRunner(module, is_first=False, is_last=False, microbatches=microbatches, **options)


def train(runner: StageRunner, scale: float = 1.0) -> list[Tensor | None]:
    """One iteration as an executor runs it; the gradients of the inputs."""
    found: list[Tensor | None] = []
    for k in range(runner.microbatches):
        outs = runner.forward(k, batch(k))
        found += runner.backward_input(k, [scale * g for g in output_grads(outs, k)])
        runner.backward_weight(k)
    return found


# --- what it runs the stage on ----------------------------------------------------------------


class Seen(torch.autograd.Function):
    """Passes a tensor on, and notes the gradient that comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grads: list[Tensor]) -> Tensor:
        ctx.grads = grads
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.grads.append(grad.clone())
        return grad, None


class Packed(nn.Module):
    """Attention over packed sequences reads out of bounds if offsets are not ascending."""

    def __init__(self, inputs: list[Tensor], grads: list[Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inputs, self.grads = inputs, grads

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        assert bool((offsets.diff() > 0).all()), offsets
        self.inputs.append(x.detach().clone())
        return Seen.apply(self.linear(x), self.grads)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_stage_only_ever_runs_on_microbatches_of_the_iteration(microbatches: int) -> None:
    inputs: list[Tensor] = []
    grads: list[Tensor] = []
    runner = runner_of(Packed(inputs, grads), microbatches)
    for k in range(microbatches):
        outs = runner.forward(k, (*batch(k), torch.tensor([0, 1 + k % 2, 4])))
        runner.backward(k, output_grads(outs, k))
    real_inputs, real_grads = inputs[:2], grads[:2]
    inputs.clear()
    grads.clear()
    assert runner.self_test().split == "module"
    assert len(inputs) > 6 and len(grads) > 6
    for found, real in ((inputs, real_inputs), (grads, real_grads)):
        used = [[torch.equal(each, one) for one in real] for each in found]
        assert all(any(row) for row in used), "something that no neighbour sent"
        assert all(any(column) for column in zip(*used, strict=True)), "one was not used"


def test_the_first_iteration_is_fused_and_leaves_the_same_bits() -> None:
    torch.manual_seed(0)
    job = Job(nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)), batch)
    want = sequential(job)
    module = job.fresh()
    runner = job.runner(module)
    orders = {"fused": "F0 F1 B0 W0 F2 B1 B2 W1 W2", "module": "F0 F1 F2 B0 B1 B2 W0 W1 W2"}
    for split, order in orders.items():
        got = Result()
        run_order(job, runner, order, got)
        assert runner.split == split
        got.grads = {name: p.grad for name, p in module.named_parameters()}
        assert_equal(want, got)
        if runner.untested:
            kept = {name: (p.grad, p.grad.clone()) for name, p in module.named_parameters()}
            torch.manual_seed(3)
            expected = torch.rand(3, generator=torch.Generator().manual_seed(3))
            runner.self_test()
            same_bits(torch.rand(3), expected, "random state")
            for name, p in module.named_parameters():
                assert p.grad is kept[name][0]
                same_bits(p.grad, kept[name][1], name)
        module.zero_grad()


def test_a_stage_that_writes_to_its_input_is_put_back_in_the_first_iteration() -> None:
    """It fails once, after its dropout has drawn numbers; what it draws next is the same."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.linear = nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            kept = self.drop(torch.ones_like(x))
            return self.linear(x.mul_(2) * kept)

    torch.manual_seed(0)
    job = Job(Writes(), batch)
    want, got, module = sequential(job), Result(), job.fresh()
    runner = job.runner(module)
    torch.manual_seed(5)
    run_order(job, runner, "F0 BW0 F1 BW1 F2 BW2", got)
    got.grads = {name: p.grad for name, p in module.named_parameters()}
    assert_equal(want, got)
    assert "writes to its input in place" in runner.self_test().line()


@pytest.mark.parametrize("scale", [0.0, float("nan")])
def test_gradients_that_would_hide_a_mistake_do_not(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a head of zeros, every gradient of the first iteration is zero, right or wrong."""
    right = deferred._weight_grad
    runner = runner_of(nn.Linear(WIDTH, WIDTH))
    train(runner, scale)
    assert runner.self_test().split == "module"
    monkeypatch.setattr(deferred, "_weight_grad", lambda *given: 2 * right(*given))
    runner = runner_of(nn.Linear(WIDTH, WIDTH))
    train(runner, scale)
    assert runner.self_test().split != "module"
    assert "changes its gradient" in runner.reason


# --- what it needs ----------------------------------------------------------------------------


class Peak(Storages):
    """The most bytes that ops had made and that were still there, parameters' left out."""

    most = 0

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__torch_dispatch__(*args, **kwargs)
        self.most = max(self.most, self.live())
        return out


@pytest.mark.parametrize("kind", ["module", "graph"])
def test_it_needs_one_more_set_of_gradients_and_no_more(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What takes long enough to be judged by its times is a matter of the machine.
    monkeypatch.setattr(self_test, "MEASURABLE", math.inf)
    layers = (nn.Linear(256, 256, bias=False) for _ in range(8))
    module = nn.Sequential(*layers) if kind == "module" else nn.Sequential(*map(Scaled, layers))
    parameters = sum(p.numel() * 4 for p in module.parameters())
    runner = runner_of(module, 2)
    for k in range(2):
        outs = runner.forward(k, (torch.ones(2, 256),))
        runner.backward(k, [torch.ones_like(out) for out in outs])
    with Peak() as peak:
        assert runner.self_test().split == kind
    # One, and the contribution of a microbatch to one weight, with what is hashed of it.
    assert parameters <= peak.most < 1.6 * parameters, peak.most / parameters


class Scaled(nn.Module):
    """Not an nn.Linear, so only the graph can be split."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


# --- what noise decides -----------------------------------------------------------------------


def test_a_pause_in_a_run_does_not_refuse_a_graph_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slow round out of three decides nothing, and no time whether a stage runs again."""
    monkeypatch.setattr(self_test, "MEASURABLE", 0.0)
    real, rounds, runs = self_test.run_trial, iter(()), []

    def timed(*args: Any, fused: bool, **options: Any) -> Outcome:
        outcome = real(*args, fused=fused, **options)
        runs.append(fused)
        outcome.seconds = {"F": 1.0, "BW": 1.0} if fused else {"F": 1.0, "B": next(rounds), "W": 0}
        return outcome

    monkeypatch.setattr(self_test, "run_trial", timed)
    counts = []
    for took, split in (((1, 9, 1), "graph"), ((9, 1, 9), "fused"), ((1.4,) * 3, "graph")):
        runs.clear()
        rounds = iter((1, 1, *took))
        runner = runner_of(nn.LayerNorm(WIDTH))
        train(runner)
        assert runner.self_test().split == split, runner.reason
        counts.append(len(runs))
    assert len(set(counts)) == 1


# --- a split that was asked for ---------------------------------------------------------------


@pytest.mark.parametrize("mode", ["module", "graph", "fused"])
def test_a_split_that_is_asked_for_is_used_at_once_and_without_a_test(mode: str) -> None:
    calls: list[int] = []
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    module.register_forward_hook(lambda *_: calls.append(1))
    runner = runner_of(module, mode=mode)
    assert runner.split == mode and not runner.untested
    assert runner.report is not None and not runner.report.tested
    runner.forward(0, batch(0))
    runner.backward_input(0, batch(1))
    assert (module[0].weight.grad is None) == (mode != "fused")
    runner.backward_weight(0)
    assert len(calls) == 1
    said = runner.report.line()
    assert "as given, without a self-test" in said
    assert ("in a LayerNorm" in said) == (mode == "module")


def test_what_split_may_be() -> None:
    assert [mode_of(each) for each in ("auto", "module", "graph", "fused", "off")] == [
        "auto", "module", "graph", "fused", "fused"
    ]  # fmt: skip
    with pytest.raises(InputError) as refused:
        mode_of("none")
    assert str(refused.value) == "split is 'none'; expected auto, module, graph, fused or off"


# --- what it says -----------------------------------------------------------------------------


class Conv1D(nn.Module):
    """As in GPT-2: a Linear that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.ones(WIDTH, WIDTH)),
            nn.Parameter(torch.zeros(WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def layers_of(count: int) -> SplitReport:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(Conv1D(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(count)
    ]
    for layer in layers:
        layer[2].weight.register_hook(lambda grad: grad)
    module = nn.Sequential(*layers, nn.Linear(WIDTH, 24 * WIDTH))
    runner = runner_of(module)
    train(runner)
    return runner.self_test()


def test_reasons_are_grouped_so_that_a_report_does_not_grow_with_the_layers() -> None:
    few, many = layers_of(2), layers_of(12)
    for report, layers in ((few, 2), (many, 12)):
        assert report.split == "module"
        line = report.line()
        assert "\n" not in line and len(line) < 600
        assert f"in a Conv1D, which is not an nn.Linear ({2 * layers} tensors, such as" in line
        assert f"*.*.weight has gradient hooks ({2 * layers} tensors" in line
    records = [json.loads(json.dumps(report.record())) for report in (few, many)]
    reasons = [[group["reason"] for group in record["not_deferred"]] for record in records]
    assert sorted(reasons[0]) == sorted(reasons[1]) and len(reasons[0]) == 3
    (conv,) = [g for g in records[1]["not_deferred"] if "Conv1D" in g["reason"]]
    assert conv == {
        "reason": "in a Conv1D, which is not an nn.Linear",
        "tensors": 24,
        "parameters": 12 * (WIDTH * WIDTH + WIDTH),
        "example": "0.0.weight",
    }
    assert records[1]["deferred_share"] == round(many.deferred_share, 6)
    assert 0.05 < many.deferred_share < few.deferred_share < 1.0
    # Times that a busy machine makes are worth a line now and then.
    assert len(many.lines()) < len(few.lines()) + 3 < 12


def test_a_fused_stage_says_why_it_is_neither() -> None:
    module = nn.Sequential(Conv1D(), nn.Tanh())
    module[0].register_full_backward_hook(lambda *_: None)
    runner = runner_of(module)
    train(runner)
    line = runner.self_test().line()
    assert "not module: no nn.Linear to defer: in a Conv1D, which is not an nn.Linear" in line
    assert "not graph: '0' has backward hooks" in line


# --- digests ----------------------------------------------------------------------------------


def test_a_digest_sees_every_bit_and_no_layout() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool):
        tensor = torch.randn(CHUNK // 64 + 3, 67).mul(9).to(dtype)
        digest = Digest.of(tensor)
        assert digest.same(Digest.of(tensor.t().contiguous().t()))
        assert not digest.same(Digest.of(tensor.t()))
        flat = tensor.view(-1)
        for place in (0, 1, CHUNK - 1, CHUNK, flat.numel() - 1):
            other = copy.deepcopy(tensor)
            raw = other.view(-1).view(torch.uint8)
            raw[place * tensor.element_size()] ^= 1
            assert not digest.same(Digest.of(other)), (dtype, place)
    # Two values that change places, and changes that cancel out in a sum.
    tensor = torch.arange(9)
    for change in ({1: 2, 2: 1}, {1: 2, 2: 0, 3: 4}):
        other = tensor.clone()
        for place, value in change.items():
            other[place] = value
        assert not Digest.of(tensor).same(Digest.of(other))
    assert Digest.of(torch.tensor([0.0, -0.0])).same(Digest.of(torch.tensor([-0.0, 0.0])))
    assert Digest.of(torch.empty(0, 2)).same(Digest.of(torch.empty(0, 2)))


def test_a_digest_tells_noise_from_a_mistake() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(300, 1000)
    noisy = tensor + 1e-4 * torch.randn_like(tensor)
    assert Digest.of(tensor).close(Digest.of(noisy))
    assert not Digest.of(tensor).same(Digest.of(noisy))
    assert not Digest.of(tensor).close(Digest.of(1.02 * tensor))
    half = tensor.clone()
    half[150:] = 0
    assert not Digest.of(tensor).close(Digest.of(half))


def test_nothing_is_kept_once_it_is_over() -> None:
    runner = runner_of(nn.Linear(WIDTH, WIDTH))
    train(runner)
    assert len(runner._samples) == 2
    runner.self_test()
    train(runner)
    assert runner._samples == []


def test_ranks_of_a_stage_decide_alike() -> None:
    """What another rank finds wrong is not deferred here either, and its failure ends the test
    here: both run the stage equally often, and choose one split."""
    wrong = "the gradient of '0.weight'"
    calls = []

    def other_finds(value: Any) -> list[Any]:
        calls.append(value)
        return [value, [wrong] if isinstance(value, list) else ""]

    def choose(agree: Any) -> SplitReport:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        runner = runner_of(module, agree=agree)
        train(runner)
        return runner.self_test()

    assert choose(lambda value: [value, value]).split == "module"
    assert set(choose(lambda value: [value, value]).deferred) == {
        "0.weight", "0.bias", "2.weight", "2.bias",
    }  # fmt: skip
    loose = choose(other_finds)
    assert calls and wrong in loose.irreproducible, "what differs there is not compared here"
    failed = choose(lambda value: [value, "it broke"] if isinstance(value, str) else [value])
    assert failed.split == "fused"
    assert "the self-test could not run the stage: it broke" in failed.reason
    foreign = choose(lambda value: [value, ["0"]] if isinstance(value, list) else [value])
    assert "0.weight" not in foreign.deferred
    assert "another rank of the stage cannot defer it" in foreign.not_deferred["0.weight"]
