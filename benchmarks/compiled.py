"""What W apart costs compiled blocks: F, B, W against the whole backward of torch's own backend.

    python benchmarks/compiled.py [--rounds 20] [--width 256] [--check] [--json FILE]

Two GPT blocks, each compiled alone, two microbatches: F0 F1 B0 B1 W0 W1. Both ways take turns in
one process with one thread; times are the least CPU time of the calling thread per microbatch, as
other load of the machine adds to every other measure. Without a warm cache of inductor the
compilation takes minutes. --check: exit 1 if B + W takes more than 1.06 times the whole backward
(1.1 in bfloat16), if a compiled block defers less than an uncompiled one, or if gradients differ
more than they may.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipemorph_trainer.examples.gpt import Block
from pipemorph_trainer.executor.split import StageRunner

MICROBATCHES = 2
GOAL, HALF_GOAL = 1.06, 1.1
"""Most of B + W relative to the whole backward; in bfloat16 products take less of it."""
HALF_TOLERANCE = 1e-2
OF_TORCH = {"": "", "pipemorph": "inductor", "pipemorph_aot_eager": "aot_eager"}
VARIANTS = {
    "uncompiled": ("", "plain"),
    "aot_eager": ("pipemorph_aot_eager", "plain"),
    "inductor": ("pipemorph", "plain"),
    "inductor, checkpoint inside": ("pipemorph", "inside"),
    "inductor, checkpoint outside": ("pipemorph", "outside"),
    "inductor, bf16 autocast": ("pipemorph", "bf16"),
    "inductor, bf16, checkpoint inside": ("pipemorph", "bf16 inside"),
}


class Cell(nn.Module):
    """One block as a variant calls it; what is compiled is this."""

    def __init__(self, width: int, variant: str) -> None:
        super().__init__()
        self.block = Block(width, 4)
        self.variant = variant

    def forward(self, x: Tensor) -> Tensor:
        run: Callable[..., Any] = self.block
        if "inside" in self.variant:
            run = partial(checkpoint, self.block, use_reentrant=False)
        if "bf16" not in self.variant:
            return run(x)  # type: ignore[no-any-return]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return run(x).float()  # type: ignore[no-any-return]


class Stage(nn.Module):
    def __init__(self, width: int, variant: str) -> None:
        super().__init__()
        self.cells = nn.ModuleList(Cell(width, variant) for _ in range(2))
        self.variant = variant

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            x = checkpoint(cell, x, use_reentrant=False) if self.variant == "outside" else cell(x)
        return x


def one_round(runner: StageRunner, x: Tensor, best: dict[str, float]) -> None:
    def timed(kind: str, call: Callable[[], Any]) -> Any:
        start = time.thread_time()
        result = call()
        best[kind] = min(best.get(kind, 1e9), (time.thread_time() - start) * 1e3)
        return result

    grad = torch.linspace(-1, 1, x.numel()).view_as(x)
    each = range(MICROBATCHES)
    for k in each:
        timed("F", lambda k=k: runner.forward(k, (x,)))
    for k in each:
        timed("B", lambda k=k: runner.backward_input(k, (grad,)))
    for k in each:
        timed("W", lambda k=k: runner.backward_weight(k))


def measure(backend: str, variant: str, width: int, rounds: int) -> dict[str, Any]:
    """Milliseconds per microbatch, the share deferred, and the largest difference of a gradient
    relative to the largest element of its tensor."""
    torch.manual_seed(0)
    whole, apart = Stage(width, variant), Stage(width, variant)
    apart.load_state_dict(whole.state_dict())
    for stage, chosen in ((whole, OF_TORCH[backend]), (apart, backend)):
        for cell in stage.cells if chosen else ():
            cell.compile(backend=chosen)
    options: dict[str, Any] = {"is_first": False, "is_last": False, "microbatches": MICROBATCHES}
    runners = {
        "fused": StageRunner(whole, mode="fused", **options),
        "split": StageRunner(apart, mode="module", **options),
    }
    x = torch.randn(4, 128, width)
    best: dict[str, dict[str, float]] = {way: {} for way in runners}
    for index in range(rounds + 2):
        for way, runner in runners.items():
            runner.module.zero_grad()
            one_round(runner, x, best[way] if index >= 2 else {})
    fused, split = best["fused"], best["split"]
    pairs = zip(whole.parameters(), apart.parameters(), strict=True)
    sizes = {name: p.numel() for name, p in apart.named_parameters()}
    return {
        "fused_F_ms": fused["F"],
        "fused_B_ms": fused["B"],
        "F_ms": split["F"],
        "B_ms": split["B"],
        "W_ms": split["W"],
        "ratio": (split["B"] + split["W"]) / fused["B"],
        "deferred": sum(sizes[n] for n in runners["split"]._splitter.deferred)
        / sum(sizes.values()),
        "difference": max(
            float((a.grad - b.grad).abs().max() / a.grad.abs().max())
            for a, b in pairs
            if a.grad is not None and b.grad is not None
        ),
    }


def broken(name: str, row: dict[str, Any], uncompiled: float) -> str:
    allowed = HALF_TOLERANCE if "bf16" in name else 0.0
    if row["ratio"] > (HALF_GOAL if "bf16" in name else GOAL):
        return f"NO {name}: B + W is {row['ratio']:.2f} times the whole backward"
    if row["deferred"] < uncompiled:
        return f"NO {name}: {row['deferred']:.1%} deferred, {uncompiled:.1%} uncompiled"
    if row["difference"] > allowed:
        return f"NO {name}: gradients differ by {row['difference']:.1e}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=", ".join(VARIANTS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, CPU, 1 thread, width {args.width}, ms per microbatch")
    print(f"{'':34}{'whole F':>9}{'B':>7}{'apart F':>10}{'B':>7}{'W':>7}{'B+W/B':>8}{'in W':>7}"
          "  gradients")  # fmt: skip
    rows: dict[str, dict[str, Any]] = {}
    wrong = []
    for name in args.variants or VARIANTS:
        torch._dynamo.reset()
        row = rows[name] = measure(*VARIANTS[name], args.width, args.rounds)
        bits = "bitwise" if row["difference"] == 0 else f"differ by {row['difference']:.0e}"
        print(f"{name:34}{row['fused_F_ms']:9.1f}{row['fused_B_ms']:7.1f}{row['F_ms']:10.1f}"
              f"{row['B_ms']:7.1f}{row['W_ms']:7.1f}{row['ratio']:8.2f}{row['deferred']:7.1%}"
              f"  {bits}", flush=True)  # fmt: skip
        uncompiled = rows.get("uncompiled", {"deferred": 0.0})["deferred"]
        if why := broken(name, row, uncompiled):
            wrong.append(why)
    for why in wrong:
        print(why)
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
    return 1 if args.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
