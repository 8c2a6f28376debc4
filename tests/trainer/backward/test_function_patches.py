"""Deferred calls alone: every gradient has the bits, dtype and layout that autograd gives."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from float32_gradients import in_float32
from gate import same_bits
from split_support import Experts, Lambda
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipemorph_trainer import register_function
from pipemorph_trainer.backward import function_patches
from pipemorph_trainer.backward.microbatch_state import run_weight_work
from pipemorph_trainer.backward.work_collector import WorkCollector
from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.module_runner import ModuleRunner

torch.set_num_threads(1)

IN, OUT = 48, 40


@contextmanager
def catching(module: nn.Module, *, verify: bool = False) -> Iterator[WorkCollector]:
    """Collect the work of a module as while an op of a stage runs."""
    sink = WorkCollector(module, verify=verify)
    sink.register_all()
    with function_patches.patched_functions(), sink:
        yield sink


def backward(sink: WorkCollector, out: Tensor, grad: Tensor) -> list[Any]:
    """B. Returns the work for W."""
    sink.begin_backward()
    torch.autograd.backward([out], [grad])
    return sink.take_work()


def deferred(
    module: nn.Module, inputs: Sequence[Tensor], grad: Tensor, *, verify: bool = False
) -> tuple[Tensor, WorkCollector]:
    """Run F, B and W of a module whose trained parameters all have to wait for W."""
    trained = [p for p in module.parameters() if p.requires_grad]
    before = [None if p.grad is None else p.grad.clone() for p in trained]
    with catching(module, verify=verify) as sink:
        out = module(*inputs)
        work = backward(sink, out, grad)
    for parameter, old in zip(trained, before, strict=True):
        assert (old is None) == (parameter.grad is None), sink.computed_in_b | sink.list_excluded()
        assert old is None or torch.equal(old, parameter.grad)
    assert {id(p) for item in work for p in item.parameters} == {id(p) for p in trained}
    run_weight_work(work)
    return out, sink


def leaf(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Tensor:
    """An input with values, strides and requires_grad."""
    x = torch.randn(shape)
    if layout == "transposed":
        x = torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)
    elif layout == "batch transposed":
        x = torch.randn(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    elif layout == "strided":
        x = torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]
    elif layout == "expanded":
        x = torch.randn(1, *shape[1:]).expand(shape)
    return x.to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("grad_layout", ["contiguous", "expanded", "transposed"])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((IN,), "contiguous"),
        ((1, IN), "contiguous"),
        ((300, IN), "contiguous"),
        ((300, IN), "transposed"),
        ((300, IN), "strided"),
        ((7, 50, IN), "contiguous"),
        ((7, 50, IN), "transposed"),
        ((7, 50, IN), "batch transposed"),
        ((7, 50, IN), "strided"),
        ((7, 50, IN), "expanded"),
        ((3, 5, 30, IN), "contiguous"),
        ((3, 5, 30, IN), "transposed"),
        ((0, IN), "contiguous"),
    ],
)
def test_bits_are_autograds(
    shape: tuple[int, ...], layout: str, grad_layout: str, bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    linear = nn.Linear(IN, OUT, bias=bias, dtype=dtype)
    x = leaf(shape, layout, dtype)
    want_y = linear(x)
    grad = torch.randn(want_y.shape, dtype=torch.float32).to(dtype)
    if grad_layout == "expanded":
        grad = torch.randn(()).to(dtype).expand(want_y.shape)
    elif grad_layout == "transposed" and grad.dim() > 1:
        grad = grad.transpose(-1, -2).contiguous().transpose(-1, -2)
    want = torch.autograd.grad(want_y, [x, *linear.parameters()], grad)
    # A graph holds the nodes of its parameters.
    want_y = want_y.detach()

    got_y, _ = deferred(linear, [x], grad)
    got = [x.grad, *(p.grad for p in linear.parameters())]
    same_bits(want_y, got_y)
    for a, b in zip(want, got, strict=True):
        assert a.dtype == b.dtype
        same_bits(a, b)
        # The gradient of a leaf gets the leaf's form.
        assert b is x.grad or a.stride() == b.stride()


def test_outside_a_deferring_b_it_is_a_linear() -> None:
    linear = nn.Linear(IN, OUT)
    x = torch.randn(6, IN, requires_grad=True)
    want = torch.autograd.grad(linear(x).sum(), [x, *linear.parameters()])
    with catching(linear):
        got = torch.autograd.grad(linear(x).sum(), [x, *linear.parameters()])
    for a, b in zip(want, got, strict=True):
        same_bits(a, b)


def test_a_weight_in_another_layout_keeps_it() -> None:
    linear = nn.Linear(IN, OUT, bias=False)
    linear.weight = nn.Parameter(torch.randn(IN, OUT).t())
    x = torch.randn(60, IN, requires_grad=True)
    grad = torch.randn(60, OUT)
    linear(x).backward(grad)
    want, linear.weight.grad = linear.weight.grad, None
    deferred(linear, [x], grad)
    same_bits(want, linear.weight.grad)
    assert want.stride() == linear.weight.grad.stride()


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_gradients_in_float32_add_up_as_autograds(layout: str) -> None:
    """A weight is used twice in each of two microbatches."""
    torch.manual_seed(4)
    linear = nn.Linear(IN, IN)
    if layout == "columns":
        linear.weight = nn.Parameter(torch.randn(IN, IN).t())
    in_float32(linear)
    batches = [torch.randn(60, IN).bfloat16().requires_grad_() for _ in range(2)]
    grads = [torch.randn(60, IN).bfloat16() for _ in range(2)]
    for x, grad in zip(batches, grads, strict=True):
        linear(torch.tanh(linear(x))).backward(grad)
    want = [p.grad for p in linear.parameters()]
    linear.zero_grad()
    for x, grad in zip(batches, grads, strict=True):
        with catching(linear) as sink:
            run_weight_work(backward(sink, linear(torch.tanh(linear(x))), grad))
    for parameter, wanted in zip(linear.parameters(), want, strict=True):
        assert wanted is not None and parameter.grad is not None
        assert wanted.dtype is torch.float32
        assert wanted.stride() == parameter.grad.stride()
        same_bits(wanted, parameter.grad)


def test_a_checkpoint_does_not_recompute_its_last_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own linear saves its operands before the product, too."""
    block = nn.Sequential(nn.Linear(IN, OUT), nn.GELU(), nn.Linear(OUT, IN))
    x = torch.randn(3, 2, IN, requires_grad=True)
    grad = torch.randn(3, 2, IN)
    want = torch.autograd.grad(
        checkpoint(block, x, use_reentrant=False), [x, *block.parameters()], grad
    )
    product, rows = function_patches._LINEAR.run, []

    def counted(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows.append(len(weight))
        return product(x, weight, bias)

    monkeypatch.setattr(function_patches._LINEAR, "run", counted)
    with catching(block) as sink:
        y = checkpoint(block, x, use_reentrant=False)
        work = backward(sink, y, grad)
    assert rows == [OUT, IN, OUT]
    run_weight_work(work)
    for a, b in zip(want, [x.grad, *(p.grad for p in block.parameters())], strict=True):
        same_bits(a, b)


# --- other functions ----------------------------------------------------------------------------


class Bare(nn.Module):
    """A function of parameters that no layer holds."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.own = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.own)


def image(*shape: int) -> Tensor:
    return torch.randn(shape)


def tokens() -> Tensor:
    return torch.randint(0, 9, (3, 7))


def addmm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x, weight)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.linear(x, weight)


def expert_by_expert(x: Tensor, weight: Tensor) -> Tensor:
    parts = (x[:2], weight[1]), (x, weight[0]), (x[1:], weight[1])
    return torch.cat([nn.functional.linear(*each) for each in parts])


def batched(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x, weight.transpose(1, 2))


def einsum(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("ecd,efd->ecf", x, weight)


def einsum_straight(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("e c d, e d f -> e c f", x, weight)


def grouped(x: Tensor, weight: Tensor) -> Tensor:
    ends = torch.tensor([8, 8, 24], dtype=torch.int32)
    return torch._grouped_mm(x, weight, offs=ends)


def grouped_across(x: Tensor, weight: Tensor) -> Tensor:
    ends = torch.tensor([8, 8, 24], dtype=torch.int32)
    return nn.functional.grouped_mm(x, weight.transpose(-2, -1), offs=ends)


def straight(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x, weight)


OPS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), lambda: image(2, 4, 9)),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, groups=2, dilation=2), lambda: image(2, 4, 9, 8)),
    "Conv2d of patches": (lambda: nn.Conv2d(3, 8, 4, stride=4), lambda: image(2, 3, 16, 16)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), lambda: image(2, 4, 6, 6)),
    "channels last": (
        lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
        lambda: image(2, 4, 6, 6).to(memory_format=torch.channels_last),
    ),
    "Conv3d": (lambda: nn.Conv3d(2, 3, (1, 2, 3)), lambda: image(2, 2, 4, 5, 6)),
    "padding of words": (lambda: nn.Conv2d(4, 6, 3, padding="same"), lambda: image(2, 4, 6, 6)),
    "without padding": (lambda: nn.Conv1d(4, 6, 3, padding="valid"), lambda: image(2, 4, 6)),
    "reflected": (lambda: nn.Conv1d(4, 6, 3, padding=1, padding_mode="reflect"),
                  lambda: image(2, 4, 6)),
    "one image": (lambda: nn.Conv2d(4, 6, 3), lambda: image(4, 6, 6)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2),
                   lambda: image(2, 4, 5, 5)),
    "transposed, 1-D": (lambda: nn.ConvTranspose1d(4, 6, 3, bias=False), lambda: image(2, 4, 5)),
    "Embedding": (lambda: nn.Embedding(9, 5), tokens),
    "padded Embedding": (lambda: nn.Embedding(9, 5, padding_idx=2), tokens),
    "scaled Embedding": (lambda: nn.Embedding(9, 5, scale_grad_by_freq=True), tokens),
    "clipped Embedding": (lambda: nn.Embedding(9, 5, max_norm=1.0), tokens),
    "addmm": (lambda: Bare(addmm, (8, 6), (6,)), lambda: image(5, 8)),
    "addmm by columns": (lambda: Bare(addmm, (8, 6), (6,)), lambda: image(8, 5).t()),
    "F.linear": (lambda: Bare(linear, (6, 8)), lambda: image(2, 5, 8)),
    "an expert": (lambda: Bare(expert_by_expert, (3, 6, 8)), lambda: image(5, 8)),
    "bmm": (lambda: Bare(straight, (3, 8, 6)), lambda: image(3, 5, 8)),
    "bmm of the transposed": (lambda: Bare(batched, (3, 6, 8)), lambda: image(3, 5, 8)),
    "frozen weight": (lambda: frozen(nn.Linear(8, 6)), lambda: image(5, 8)),
}  # fmt: skip


EXPERTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "einsum": (lambda: Bare(einsum, (3, 6, 8)), lambda: image(3, 5, 8)),
    "einsum by rows": (lambda: Bare(einsum_straight, (3, 8, 6)), lambda: image(3, 5, 8)),
    "grouped": (lambda: Bare(grouped, (3, 16, 8)), lambda: image(24, 16)),
    "grouped, across": (lambda: Bare(grouped_across, (3, 8, 16)), lambda: image(24, 16)),
}
"""Modules whose weight gradients come in B under autocast."""


def frozen(linear: nn.Linear) -> nn.Linear:
    linear.weight.requires_grad_(False)
    return linear


@pytest.mark.parametrize(
    ("name", "autocast"),
    [(name, on) for name in [*OPS, *EXPERTS] for on in (False, True) if name in OPS or not on],
)
def test_every_function_that_waits_gives_autograds_bits(name: str, autocast: bool) -> None:
    make, given = (OPS | EXPERTS)[name]
    torch.manual_seed(3)
    module, x = make(), given()
    floats = x.is_floating_point()
    leaf = x.clone().requires_grad_(floats)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        # Autocast would cast a leaf once for all its uses.
        out = module(leaf * 1 if floats else leaf)
        grad = torch.randn(out.shape).to(out.dtype)
    out.backward(grad)
    out = out.detach()
    want = [leaf.grad, *(p.grad for p in module.parameters())]
    for parameter in module.parameters():
        parameter.grad = None
    again = x.clone().requires_grad_(floats)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got_out, sink = deferred(module, [again * 1 if floats else again], grad, verify=True)
    same_bits(out, got_out)
    for a, b in zip(want, [again.grad, *(p.grad for p in module.parameters())], strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            same_bits(a, b)
    assert sink.compared and not sink.different


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("used", [1, 3])
@pytest.mark.parametrize("autocast", [False, True])
def test_experts_add_up_as_autograds(dtype: torch.dtype, used: int, autocast: bool) -> None:
    """The gradient may have values in ``.grad`` before, and experts may get no token."""
    torch.manual_seed(3)
    module = Experts(dtype)
    module.used = used
    x, grad = torch.randn(9, 8, dtype=dtype), torch.randn(9, 8, dtype=dtype)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = [copy.deepcopy(p.grad) for p in module.parameters()]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast and dtype is torch.float32):
        module(x).backward(grad)
        want = [p.grad for p in module.parameters()]
        for parameter, old in zip(module.parameters(), before, strict=True):
            parameter.grad = old
        _, sink = deferred(module, [x], grad, verify=True)
    for a, parameter in zip(want, module.parameters(), strict=True):
        assert a is not None and parameter.grad is not None
        same_bits(a, parameter.grad)
    assert sink.compared and not sink.different and not sink.list_excluded()


def of_hooked_part(x: Tensor, weight: Tensor) -> Tensor:
    part = weight[1]
    part.register_hook(lambda grad: 2 * grad)
    return nn.functional.linear(x, part)


def of_stored_part(x: Tensor, weight: Tensor) -> Tensor:
    part = weight[1]
    part.retain_grad()
    return nn.functional.linear(x, part) * (1 if part.grad is None else 2)


def of_part_of_part(x: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.linear(x, weight[1][:4])


def of_part_and_rest(x: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.linear(x, weight[1]) + weight.sum()


@pytest.mark.parametrize("use", [of_hooked_part, of_stored_part, of_part_of_part, of_part_and_rest])
def test_a_part_that_is_more_than_an_expert_stays_in_b(use: Callable[..., Tensor]) -> None:
    torch.manual_seed(3)
    module, x = Bare(use, (3, 6, 8)), torch.randn(5, 8)
    out = module(x)
    grad = torch.randn(out.shape)
    out.backward(grad)
    (parameter,) = module.parameters()
    want, parameter.grad = parameter.grad, None
    with catching(module) as sink:
        run_weight_work(backward(sink, module(x), grad))
    assert want is not None and parameter.grad is not None
    same_bits(want, parameter.grad)


def test_attention_defers_its_projections() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    module = Lambda(lambda m, x: m.attention(x, x, x)[0], attention=attention)
    deferred(module, [torch.randn(2, 5, 8)], torch.randn(2, 5, 8))


def conv1d(n_in: int, n_out: int) -> nn.Module:
    """The linear layer of GPT-2."""

    def forward(m: Any, x: Tensor) -> Tensor:
        out = torch.addmm(m.bias, x.view(-1, n_in), m.weight)
        return out.view(*x.shape[:-1], n_out)

    weight, bias = nn.Parameter(torch.randn(n_in, n_out)), nn.Parameter(torch.zeros(n_out))
    return Lambda(forward, weight=weight, bias=bias)


def language_model(layer: Callable[..., nn.Module], norm: Callable[[int], nn.Module]) -> nn.Module:
    """Layers of GPT-2 or Llama, with an embedding that is the head, too."""

    def forward(m: Any, ids: Tensor) -> Tensor:
        x = m.embedding(ids)
        q, k, v = m.qkv(m.norms[0](x)).chunk(3, -1)
        x = x + m.out(nn.functional.scaled_dot_product_attention(q, k, v))
        x = m.norms[2](x + m.down(nn.functional.silu(m.up(m.norms[1](x)))))
        return nn.functional.linear(x, m.embedding.weight)

    return Lambda(
        forward,
        embedding=nn.Embedding(96, 64),
        norms=nn.ModuleList(norm(64) for _ in range(3)),
        qkv=layer(64, 192),
        out=layer(64, 64),
        up=layer(64, 256),
        down=layer(256, 64),
    )


@pytest.mark.parametrize("kind", ["GPT-2", "Llama"])
def test_nearly_all_of_a_language_model_waits(kind: str) -> None:
    if kind == "GPT-2":
        model = language_model(conv1d, nn.LayerNorm)
    else:
        model = language_model(lambda i, o: nn.Linear(i, o, bias=False), nn.RMSNorm)
    runner = ModuleRunner(model, is_first=True, is_last=False, microbatches=1)
    (out,) = runner.run_forward(0, (torch.randint(0, 96, (2, 9)),))
    runner.run_fused_backward(0, (torch.randn(out.shape),))
    assert runner.build_report().deferred_share > 0.99, runner.build_report().format_lines()


# --- what is not patched ------------------------------------------------------------------------


def usual(x: Tensor, module: nn.Module) -> Tensor:
    return module(x)


def test_functions_are_ours_for_an_op_alone() -> None:
    own = torch.nn.functional.linear
    with function_patches.patched_functions():
        assert torch.nn.functional.linear is not own
        with function_patches.patched_functions():
            pass
        assert torch.nn.functional.linear is not own
        # A module of no stage.
        linear, x = nn.Linear(3, 2), torch.randn(4, 3)
        linear(x).sum().backward()
        assert linear.weight.grad is not None
    assert torch.nn.functional.linear is own


def test_functions_have_the_names_of_torchs() -> None:
    """A module whose first import is in an op keeps ours for good, and inductor's its name."""
    places = [(torch, "addmm"), (torch, "embedding"), (torch.nn.functional, "linear")]
    places += [(torch.nn.functional, f"conv{kind}d") for kind in ("1", "_transpose3")]
    before = [getattr(place, name) for place, name in places]
    with function_patches.patched_functions():
        patched = [getattr(place, name) for place, name in places]
    assert [each.__name__ for each in patched] == [each.__name__ for each in before]
    x, weight, bias = torch.randn(3, 4), torch.randn(2, 4), torch.randn(2)
    assert torch.equal(
        patched[0](bias, x, weight.t(), out=torch.empty(3, 2)), patched[2](x, weight, bias)
    )


def test_a_function_that_another_library_has_replaced_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = torch.nn.functional.linear

    def theirs(*args: Any) -> Tensor:
        return own(*args)

    monkeypatch.setattr(function_patches, "_foreign_replacements", {})
    monkeypatch.setattr(torch.nn.functional, "linear", theirs)
    linear = nn.Linear(3, 2)
    for _ in range(2):
        with catching(linear) as sink:
            assert torch.nn.functional.linear is theirs
            assert not backward(sink, linear(torch.randn(4, 3)), torch.ones(4, 2))
    assert linear.weight.grad is not None
    assert caplog.text.count("linear was replaced by") == 1
    assert function_patches.list_foreign_replacements() == [
        f"linear was replaced by {theirs.__module__}.theirs"
    ]


class Halved(torch.overrides.TorchFunctionMode):
    """Redefines a function, as quantization may."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **kwargs or {})
        return found / 2 if function is torch._C._nn.linear else found


def under_vmap(x: Tensor, module: nn.Module) -> Tensor:
    return torch.vmap(module)(x)


def under_mode(x: Tensor, module: nn.Module) -> Tensor:
    with Halved():
        return usual(x, module)


def called(x: Tensor, module: nn.Module) -> Tensor:
    weights = {name: p * 2 for name, p in module.named_parameters()}
    return torch.func.functional_call(module, weights, (x,))


def odd_bias(x: Tensor, module: nn.Module) -> Tensor:
    return nn.functional.linear(x, module.weight[:1], None) + nn.functional.linear(
        x, module.weight, module.bias[:1]
    )


@pytest.mark.parametrize("use", [under_vmap, under_mode, called, odd_bias])
def test_an_unusual_use_ends_the_deferral_of_all_uses(
    use: Callable[[Tensor, nn.Module], Tensor],
) -> None:
    torch.manual_seed(2)
    module, x = nn.Linear(6, 6), torch.randn(5, 6, requires_grad=True)
    grad = torch.randn(5, 6)
    (use(module(x).tanh(), module)).backward(grad)
    want = [x.grad, *(p.grad for p in module.parameters())]
    x.grad = None
    module.zero_grad()
    with catching(module) as sink:
        out = use(module(x).tanh(), module)
        run_weight_work(backward(sink, out, grad))
    for a, b in zip(want, [x.grad, *(p.grad for p in module.parameters())], strict=True):
        assert a is not None and b is not None
        same_bits(a, b)


# --- verify -------------------------------------------------------------------------------------


def test_verify_names_what_differs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = type(function_patches._LINEAR).weight_grads

    def wrong(*args: Any) -> list[Tensor]:
        return [each * (1 + 1e-6) for each in right(*args)]

    monkeypatch.setattr(type(function_patches._LINEAR), "weight_grads", wrong)
    block = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))
    with catching(block, verify=True) as sink:
        for _ in range(2):
            backward(sink, block(torch.randn(3, 6)), torch.randn(3, 6))
    assert set(sink.different) == {"0.weight", "1.weight"}
    (said, *_) = [r.getMessage() for r in caplog.records if "'0.weight'" in r.getMessage()]
    assert "the gradient of the weight of the call with '0.weight', (5, 6) float32" in said
    assert "differs by up to" in said
    assert caplog.text.count("'1.weight'") == 1


def test_nan_gradients_are_equal() -> None:
    linear = nn.Linear(3, 2)
    _, sink = deferred(linear, [torch.randn(4, 3)], torch.full((4, 2), torch.nan), verify=True)
    assert sink.compared and not sink.different


# --- registered functions -------------------------------------------------------------------------


def scaled(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, by: float = 2.0) -> Tensor:
    return (x.mm(weight) * by) if bias is None else (x.mm(weight) * by) + bias


def of_scaled(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, by: float
) -> dict[str, Tensor]:
    return {"weight": x.t().mm(grad * by), "bias": grad.sum(0)}


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(function_patches, "_replaced", dict(function_patches._replaced))

    class Place(SimpleNamespace):
        def __hash__(self) -> int:
            return id(self)

    return Place(scaled=scaled)


class Scaled(nn.Module):
    def __init__(self, place: SimpleNamespace, *, bias: bool = True) -> None:
        super().__init__()
        self.place = place
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.bias = nn.Parameter(torch.randn(6)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.place.scaled(x, self.weight, bias=self.bias, by=3.0)


@pytest.mark.parametrize("bias", [True, False])
def test_a_registered_function_waits(place: SimpleNamespace, bias: bool) -> None:
    register_function(place, "scaled", ["weight", "bias"], of_scaled)
    module, grad = Scaled(place, bias=bias), torch.randn(5, 6)
    x = torch.randn(5, 6, requires_grad=True)
    module(x).backward(grad)
    want = [x.grad, *(p.grad for p in module.parameters())]
    x.grad = None
    module.zero_grad()
    _, sink = deferred(module, [x], grad, verify=True)
    assert not sink.different
    for a, b in zip(want, [x.grad, *(p.grad for p in module.parameters())], strict=True):
        assert a is not None and b is not None
        same_bits(a, b)
    assert place.scaled is scaled
    # Twice differentiable.
    with catching(module) as sink:
        (slope,) = torch.autograd.grad(module(x).pow(2).sum(), x, create_graph=True)
        backward(sink, slope.pow(2).sum(), torch.ones(()))
    (slope,) = torch.autograd.grad(module(x).pow(2).sum(), x, create_graph=True)
    (want_weight,) = torch.autograd.grad(slope.pow(2).sum(), module.weight)
    torch.testing.assert_close(module.weight.grad - want[1], want_weight)


def test_a_registered_function_that_gives_another_shape_is_refused(place: SimpleNamespace) -> None:
    register_function(place, "scaled", ["weight"], lambda grad, **_: {"weight": grad})
    module = Scaled(place, bias=False)
    with catching(module) as sink:
        work = backward(sink, module(torch.randn(5, 6)), torch.randn(5, 6))
    with pytest.raises(SplitError, match=r"gave shape \(5, 6\) for 'weight'; expected .*\(6, 6\)"):
        run_weight_work(work)


def test_what_cannot_be_registered_is_refused(place: SimpleNamespace) -> None:
    with pytest.raises(TypeError, match="expected a Python function"):
        register_function(place, "missing", ["weight"], of_scaled)
    with pytest.raises(TypeError, match="has no argument 'gain'"):
        register_function(place, "scaled", ["gain"], of_scaled)
    register_function(place, "scaled", ["weight"], of_scaled)
    with pytest.raises(TypeError, match="was registered before"):
        register_function(place, "scaled", ["weight"], of_scaled)
