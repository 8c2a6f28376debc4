"""Modules that are linear in their weights, but not nn.Linear, wait for W once they are
registered."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from split_support import Job, Result, assert_equal, sequential, split
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipemorph_trainer
from pipemorph_trainer.executor.split import StageRunner, registered
from pipemorph_trainer.executor.split.deferred import Layer, run_weight_work
from pipemorph_trainer.torch import split_backward

DELAYED = "F0 F1 F2 B0 B1 W0 B2 W1 W2"
WIDTH = 8


class Conv1D(nn.Module):
    """A Linear whose weight is stored transposed, as in transformers' GPT-2."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.n_out = n_out
        self.weight = nn.Parameter(torch.randn(n_in, n_out) * 0.1)
        self.bias = nn.Parameter(torch.randn(n_out))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.n_out)
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(shape)


class Named(Conv1D):
    pass


class Other(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Conv1D(WIDTH, WIDTH), nn.GELU(), Conv1D(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = Conv1D(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.conv(x).tanh())


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Conv1D(WIDTH, WIDTH), nn.GELU(), Conv1D(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x).float()


def conv1d(module: Conv1D, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    assert not torch.is_grad_enabled()
    assert module.n_out == grad.shape[-1]
    rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return {"weight": rows.t().to(grad.dtype).mm(grad_rows), "bias": grad_rows.sum(0)}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registered, "_registered", dict(registered._registered))
    pipemorph_trainer.register_linear(Conv1D, conv1d)
    yield


def vectors(k: int) -> tuple[Tensor, ...]:
    return (torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(k)),)


def checked(module: nn.Module, **options: object) -> StageRunner:
    job = Job(module, vectors, **options)
    want = sequential(job)
    got, runner = split(job, DELAYED)
    assert_equal(want, got)
    for order in ("F0 B0 F1 B1 W0 F2 B2 W1 W2", "F0 F1 F2 BW0 BW1 BW2"):
        again: Result = split(job, order)[0]
        assert_equal(want, again)
    return runner


STAGES: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(Conv1D(WIDTH, 16), nn.GELU(), Conv1D(16, WIDTH)),
    "with Linears": lambda: nn.Sequential(nn.Linear(WIDTH, 16), Conv1D(16, 16), nn.Linear(16, 4)),
    "a subclass with its forward": lambda: nn.Sequential(Named(WIDTH, WIDTH)),
    "checkpoint": Checkpointed,
    "used twice": Twice,
    "written in place": lambda: nn.Sequential(Conv1D(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "autocast": Autocast,
}


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("name", STAGES)
def test_every_gradient_waits_with_the_same_bits(name: str, is_first: bool) -> None:
    torch.manual_seed(2)
    runner = checked(STAGES[name](), is_first=is_first)
    assert runner.report is not None
    assert runner.report.deferred_share == 1.0, runner.report.lines()


def test_frozen_parameters_get_no_gradient() -> None:
    stage = nn.Sequential(Conv1D(WIDTH, WIDTH), nn.Tanh(), Conv1D(WIDTH, WIDTH))
    stage[0].weight.requires_grad_(False)
    stage[2].bias.requires_grad_(False)
    report = checked(stage).report
    assert report is not None
    assert report.deferred == ("0.bias", "2.weight")


def test_by_name_without_an_import() -> None:
    del registered._registered[Conv1D]
    assert checked(nn.Sequential(Conv1D(WIDTH, WIDTH), nn.Linear(WIDTH, 4))).report.deferred == (
        "1.weight", "1.bias",
    )  # fmt: skip
    pipemorph_trainer.register_linear(f"{__name__}.Conv1D", conv1d)
    assert checked(nn.Sequential(Conv1D(WIDTH, WIDTH))).report.deferred_share == 1.0


def test_a_subclass_with_another_forward_stays_in_b() -> None:
    report = checked(nn.Sequential(Other(WIDTH, WIDTH), nn.Linear(WIDTH, 4))).report
    assert report is not None
    assert "in a Other, which is not an nn.Linear" in report.line()


def test_a_subclass_of_linear_with_another_forward_can_be_registered() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    def scaled(module: Scaled, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
        rows = (grad * 2).reshape(-1, grad.shape[-1])
        return {"weight": rows.t().mm(x.reshape(-1, x.shape[-1])), "bias": rows.sum(0)}

    pipemorph_trainer.register_linear(Scaled, scaled)
    assert checked(nn.Sequential(Scaled(WIDTH, WIDTH))).report.deferred_share == 1.0


def test_a_wrong_function_is_found() -> None:
    pipemorph_trainer.register_linear(
        Conv1D, lambda m, x, g: {**conv1d(m, x, g), "bias": 2 * g.flatten(0, -2).sum(0)}
    )
    report = checked(nn.Sequential(Conv1D(WIDTH, WIDTH), nn.Linear(WIDTH, 4))).report
    assert report is not None
    assert report.not_deferred["0.weight"] == "deferring 0.bias changes its gradient"
    assert report.deferred == ("1.weight", "1.bias")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda m, x, g: {"weight": conv1d(m, x, g)["weight"]}, "gave nothing for 'bias' of '0'"),
        (lambda m, x, g: {**conv1d(m, x, g), "bias": g}, "gave shape (3, 5, 8) for 'bias' of '0'"),
    ],
)
def test_what_a_function_lacks_is_said(function: object, says: str) -> None:
    pipemorph_trainer.register_linear(Conv1D, function)
    runner = checked(nn.Sequential(Conv1D(WIDTH, WIDTH)))
    assert "; expected shape (8,)" in runner.reason
    assert says in runner.reason


def test_a_gradient_that_is_the_outputs_own_is_copied() -> None:
    """`.grad` is written in place by the next microbatch."""
    conv, x, grad = Conv1D(1, WIDTH), torch.ones(1, 1), torch.ones(1, WIDTH)
    needed = {"bias": conv.bias}
    own = lambda module, x, grad: {"bias": grad[0]}  # noqa: E731
    work = registered.RegisteredWork(Layer("conv", conv), own, x, grad, needed=needed)
    run_weight_work([work])
    assert torch.equal(conv.bias.grad, grad[0])
    assert conv.bias.grad.data_ptr() != grad.data_ptr()


@pytest.mark.parametrize("kind", [nn.Linear, int, 3])
def test_what_cannot_be_registered(kind: object) -> None:
    with pytest.raises(TypeError, match="register_linear got"):
        pipemorph_trainer.register_linear(kind, conv1d)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_a_plain_module(make: Callable[[nn.Module], nn.Module]) -> None:
    stage = nn.Sequential(Conv1D(2, 2))
    builder = split_backward(stage)
    other = make(stage)
    assert builder
    for each in (stage, other):
        each(torch.ones(1, 2)).sum().backward()
    assert stage[0].weight.grad is None
    assert other[0].weight.grad is not None
    builder()()
    assert torch.equal(stage[0].weight.grad, other[0].weight.grad)


def test_gpt2s_is_known() -> None:
    assert "transformers.pytorch_utils.Conv1D" in registered._registered


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_gpt2_of_transformers_defers_its_share() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, resid_pdrop=0.1
    )

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.GPT2Model(config)

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(input_ids=ids, use_cache=False).last_hidden_state

    def tokens(k: int) -> tuple[Tensor, ...]:
        return (torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(k)),)

    torch.manual_seed(2)
    job = Job(Stage(), tokens, is_first=True)
    want = sequential(job)
    got, runner = split(job, DELAYED)
    assert_equal(want, got)
    report = runner.report
    assert report is not None
    waiting = {n for n in report.sizes if ".attn." in n or ".mlp." in n}
    assert set(report.deferred) == waiting, report.lines()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("base", ["frozen", "trained"])
def test_adapters_of_peft_wait_for_w(kind: str, base: str) -> None:
    """LoRA around GPT-2's Conv1D, registered, and around Llama's Linears. The adapters' Linears
    wait for W, and where the base is trained, too, so do its weights."""
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    if kind == "gpt2":
        model = transformers.GPT2Model(
            transformers.GPT2Config(
                n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, resid_pdrop=0.1
            )
        )
        targets, within = ["c_attn", "c_proj", "c_fc"], (".attn.", ".mlp.")
    else:
        model = transformers.LlamaModel(
            transformers.LlamaConfig(
                num_hidden_layers=2, hidden_size=32, intermediate_size=64, vocab_size=64,
                num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
            )
        )  # fmt: skip
        targets, within = ["q_proj", "v_proj", "down_proj"], ("_proj.",)
    torch.manual_seed(2)
    config = peft.LoraConfig(
        r=4, target_modules=targets, lora_dropout=0.1, fan_in_fan_out=kind == "gpt2",
        init_lora_weights=False,
    )  # fmt: skip
    adapted = peft.get_peft_model(model, config)
    if base == "trained":
        for parameter in adapted.parameters():
            parameter.requires_grad_(True)

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = adapted

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(input_ids=ids, use_cache=False).last_hidden_state

    def tokens(k: int) -> tuple[Tensor, ...]:
        return (torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(k)),)

    job = Job(Stage(), tokens, is_first=True)
    want = sequential(job)
    got, runner = split(job, DELAYED)
    assert_equal(want, got)
    report = runner.report
    assert report is not None
    waiting = {
        name
        for name, parameter in job.module.named_parameters()
        if parameter.requires_grad and any(part in name for part in within)
    }
    assert len({name for name in waiting if "lora" in name}) >= 12
    assert set(report.deferred) == waiting, report.lines()
