"""Stages known to break split backwards. Each has the bits of a plain loop in every op order."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from split_support import Experts, Job, Lambda, assert_equal, sequential, split
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DELAYED = "F0 F1 F2 B0 B1 W0 B2 W1 W2"
WIDTH = 8


@dataclass
class Beast:
    """A stage, and the share of its trained parameters that has to wait for W."""

    job: Job
    share: float


def vectors(k: int) -> tuple[Tensor, ...]:
    return (torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(k)),)


def tokens(k: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(k)),)


def images(k: int) -> tuple[Tensor, ...]:
    return (torch.randn(3, 2, 6, 6, generator=torch.Generator().manual_seed(k)),)


def job(module: nn.Module, make_args=vectors, **options) -> Job:
    return Job(module, make_args, **options)


def linear(n_in: int = WIDTH, n_out: int = WIDTH, **options) -> nn.Linear:
    return nn.Linear(n_in, n_out, **options)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2)
            for t in self.qkv(x).split(width, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """GPT block, the usual subject of the module split."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


def checkpointed(block: nn.Module, reentrant: bool) -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.head(checkpoint(m.block, x, use_reentrant=reentrant))

    return Lambda(forward, block=block, head=linear())


class DoubleFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def next_tokens(k: int) -> Tensor:
    return tokens(100 + k)[0]


class TiedLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(ids)))


def sometimes(m: nn.Module, x: Tensor) -> Tensor:
    """Skips a Linear in every other microbatch."""
    m.calls += 1
    x = m.first(x)
    return m.other(x).tanh() if m.calls % 2 else x.tanh()


def keeps_input(m: nn.Module, x: Tensor) -> Tensor:
    m.last_input = x
    return m.linear(x) + m.last_input


def lora(m: nn.Module, x: Tensor) -> Tensor:
    return m.base(x) + 0.5 * m.up(m.down(x))


def add_hooks(module: nn.Module) -> None:
    module[0].weight.register_hook(lambda grad: grad * 2)
    module[2].bias.register_post_accumulate_grad_hook(halve)


def halve(parameter: nn.Parameter) -> None:
    parameter.grad *= 0.5


def frozen() -> nn.Module:
    module = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh(), linear())
    module[0].requires_grad_(False)
    module[2].weight.requires_grad_(False)
    module[4].bias.requires_grad_(False)
    return module


def double(module: nn.Module) -> nn.Module:
    return module.to(torch.float64)


def autocast(m: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.second(F.gelu(m.first(x))).float()


def autocast_twice(m: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.first(F.gelu(m.first(x))).float()


ZOO = {
    "gpt block": lambda: Beast(job(Block()), 0.96),
    "gpt block, bf16": lambda: Beast(
        Job(Block().to(torch.bfloat16), lambda k: (vectors(k)[0].bfloat16(),)), 0.96
    ),
    "gpt block, first stage": lambda: Beast(job(Block(), is_first=True), 0.96),
    "language model, one stage": lambda: Beast(
        job(
            nn.Sequential(nn.Embedding(11, WIDTH), Block(), linear(WIDTH, 11)),
            tokens,
            is_first=True,
            is_last=True,
            loss_fn=cross_entropy,
            make_target=next_tokens,
        ),
        0.97,
    ),
    "Linear used twice": lambda: Beast(
        job(Lambda(lambda m, x: m.lin(torch.tanh(m.lin(x))), lin=linear())), 1
    ),
    "weight used inside and outside its Linear": lambda: Beast(
        job(Lambda(lambda m, x: F.linear(m.a(m.b(x)).tanh(), m.a.weight), a=linear(), b=linear())),
        1,
    ),
    "tied embedding and head": lambda: Beast(job(TiedLM(), tokens, is_first=True), 0.97),
    "tied Linears": lambda: Beast(job(_tied_linears()), 1),
    "checkpoint, non-reentrant": lambda: Beast(job(checkpointed(Block(), False)), 0.97),
    "checkpoint with dropout": lambda: Beast(job(checkpointed(Block(dropout=0.5), False)), 0.97),
    "checkpoint, reentrant": lambda: Beast(job(checkpointed(Block(), True)), 0.97),
    "Linear shared by two reentrant checkpoints and a third use": lambda: Beast(
        job(
            Lambda(
                lambda m, x: m.lin(
                    checkpoint(m.lin, checkpoint(m.lin, x, use_reentrant=True), use_reentrant=True)
                ),
                lin=linear(),
            )
        ),
        1,
    ),
    "view output: a 3-D Linear last": lambda: Beast(
        job(nn.Sequential(nn.LayerNorm(WIDTH), linear())), 0.82
    ),
    "view output: a transpose last": lambda: Beast(
        job(Lambda(lambda m, x: m.lin(x).transpose(0, 1), lin=linear())), 1
    ),
    "autograd.Function at the output": lambda: Beast(
        job(Lambda(lambda m, x: DoubleFunction.apply(m.lin(x)), lin=linear())), 1
    ),
    "compiled stage": lambda: Beast(
        job(torch.compile(nn.Sequential(linear(), nn.Tanh(), linear()), backend="eager")), 0
    ),
    "compiled in place": lambda: Beast(
        job(nn.Sequential(linear(), nn.Tanh()), prepare=lambda m: m.compile(backend="eager")), 0
    ),
    "compiled submodule": lambda: Beast(
        job(nn.Sequential(torch.compile(linear(), backend="eager"), nn.Tanh(), linear())), 0.5
    ),
    "compiled function around a Linear": lambda: Beast(
        job(
            Lambda(
                lambda m, x: m.b(torch.compile(lambda y: m.a(y).tanh(), backend="eager")(x)),
                a=linear(),
                b=linear(),
            )
        ),
        0.5,
    ),
    "hooks on parameters": lambda: Beast(
        job(nn.Sequential(linear(), nn.Tanh(), linear(), linear()), prepare=add_hooks), 0.33
    ),
    "frozen parameters": lambda: Beast(job(frozen()), 1),
    "all frozen": lambda: Beast(job(Block().requires_grad_(False)), 0),
    "dropout": lambda: Beast(job(Block(dropout=0.5)), 0.96),
    "BatchNorm": lambda: Beast(
        Job(nn.Sequential(nn.Flatten(), linear(40, 8), nn.BatchNorm1d(8), linear(8, 4)), vectors),
        0.96,
    ),
    "convolutions": lambda: Beast(
        job(
            nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)),
            images,
        ),
        0.95,
    ),
    "convolutions with a small head": lambda: Beast(
        job(
            nn.Sequential(
                nn.Conv2d(2, 32, 3),
                nn.ReLU(),
                nn.Conv2d(32, 32, 3),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                linear(32, 4),
            ),
            images,
        ),
        1,
    ),
    "autocast": lambda: Beast(job(Lambda(autocast, first=linear(), second=linear())), 1),
    "autocast, Linear used twice": lambda: Beast(job(Lambda(autocast_twice, first=linear())), 1),
    "parametrized": lambda: Beast(
        job(nn.Sequential(nn.utils.parametrizations.weight_norm(linear()), linear())), 0.47
    ),
    "spectral norm": lambda: Beast(
        job(nn.Sequential(nn.utils.parametrizations.spectral_norm(linear()), linear())), 0.5
    ),
    "LayerNorm only": lambda: Beast(
        job(nn.Sequential(nn.LayerNorm(WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))), 0
    ),
    "Embedding only, first stage": lambda: Beast(
        job(nn.Embedding(11, WIDTH), tokens, is_first=True), 1
    ),
    "several outputs, one of integers": lambda: Beast(
        job(Lambda(lambda m, x: (m.a(x), x.argmax(-1), m.b(x).tanh()), a=linear(), b=linear())), 1
    ),
    "several inputs, one of integers": lambda: Beast(
        job(
            Lambda(lambda m, x, i, y: m.a(x) + m.e(i) * y, a=linear(), e=nn.Embedding(11, WIDTH)),
            lambda k: (vectors(k)[0], tokens(k)[0], vectors(k + 50)[0]),
        ),
        1,
    ),
    "input passed through": lambda: Beast(job(Lambda(lambda m, x: (m.a(x), x), a=linear())), 1),
    "output that ignores the input": lambda: Beast(
        job(Lambda(lambda m, x: (m.a(x), m.e.weight * 2), a=nn.LayerNorm(8), e=nn.Embedding(3, 2))),
        0,
    ),
    "in-place ops": lambda: Beast(
        job(nn.Sequential(linear(), nn.ReLU(inplace=True), linear(), nn.ReLU(inplace=True))), 1
    ),
    "in-place ops on the input": lambda: Beast(
        job(nn.Sequential(nn.ReLU(inplace=True), linear())), 1
    ),
    "LoRA": lambda: Beast(
        job(
            Lambda(
                lora,
                base=linear().requires_grad_(False),
                down=linear(WIDTH, 2, bias=False),
                up=linear(2, WIDTH, bias=False),
            )
        ),
        1,
    ),
    "Linear skipped now and then": lambda: Beast(
        job(Lambda(sometimes, first=linear(), other=linear(), calls=0)), 1
    ),
    "multi-head attention": lambda: Beast(
        job(nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)), 0.95
    ),
    "saves its own input": lambda: Beast(job(Lambda(keeps_input, linear=linear())), 1),
    "input not contiguous": lambda: Beast(
        job(Lambda(lambda m, x: m.a(x.transpose(0, 1)) + 1, a=linear())), 1
    ),
    "experts": lambda: Beast(job(Lambda(_routed, gate=linear(), experts=Experts())), 1),
    "experts of a checkpoint": lambda: Beast(
        job(
            Lambda(
                lambda m, x: checkpoint(_routed, m, x, use_reentrant=False),
                gate=linear(),
                experts=Experts(),
            )
        ),
        1,
    ),
    "one row": lambda: Beast(
        job(linear(), lambda k: (torch.randn(WIDTH, generator=torch.Generator().manual_seed(k)),)),
        1,
    ),
    "column-major input": lambda: Beast(
        job(Lambda(lambda m, x: m.b(m.a(x[:, 0]).t().contiguous().t()), a=linear(), b=linear())), 1
    ),
    "two-dimensional, double": lambda: Beast(
        Job(double(linear()), lambda k: (vectors(k)[0].double().flatten(0, 1),)), 1
    ),
    "gradient inside the forward": lambda: Beast(job(Lambda(_force, a=linear(), b=linear())), 0.5),
    "Linear subclass with its own forward": lambda: Beast(
        job(nn.Sequential(_Scaled(WIDTH, WIDTH), linear())), 1
    ),
}


def _routed(m: nn.Module, x: Tensor) -> Tensor:
    return (m.experts(x.flatten(0, 1)) * m.gate(x.flatten(0, 1)).sigmoid()).view_as(x)


def _tied_linears() -> nn.Module:
    module = nn.Sequential(linear(), nn.Tanh(), linear(), linear())
    module[2].weight = module[0].weight
    return module


class _Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def _force(m: nn.Module, x: Tensor) -> Tensor:
    """First-order gradients taken inside the forward must leave the weights alone."""
    probe = x.detach().requires_grad_()
    (force,) = torch.autograd.grad(m.a(probe).pow(2).sum(), probe)
    return m.b(x + force)


@pytest.mark.parametrize("name", ZOO)
def test_zoo(name: str) -> None:
    torch.manual_seed(1)
    beast = ZOO[name]()
    want = sequential(beast.job)
    got, runner = split(beast.job, DELAYED)
    assert_equal(want, got)
    assert round(runner.build_report().deferred_share, 2) == beast.share, (
        runner.build_report().format_lines()
    )
    for order in (
        "F0 B0 F1 B1 W0 F2 B2 W1 W2",
        "F0 F1 F2 BW0 BW1 BW2",
        "F0 F1 BW0 F2 B1 B2 W1 W2",
        "F0 F1 B0 F2 W0 BW1 B2 W2",
    ):
        again, _ = split(beast.job, order, measures=order.startswith("F0 F1 BW0"))
        assert_equal(want, again)
