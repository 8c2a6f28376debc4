"""What splitting the backward costs: F, B, W of one stage against its unsplit backward.

    python benchmarks/split.py [--rounds 30] [--threads 1] [--clock cpu] [--json FILE]

Times are CPU seconds of the process by default: on a machine shared with other work they vary
less than wall time, and with one thread the two are the same on an idle one.

All ways take turns in one process: in every round each runs four microbatches, F of all, then B
and W of each in turn. Ratios are medians over the rounds of (this way) / (unsplit backward of
the same round), so that a machine that gets slower in between slows both sides. As a peer there
is the graph split inside torch.distributed.pipelining, called on the same stage. Exits 1 if our
split of a block with activation checkpointing costs more than 1.08 times its unsplit backward.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipemorph_trainer.examples.gpt import Block
from pipemorph_trainer.executor.split import StageRunner

MICROBATCHES = 4
RECOMPUTED, MOST = "gpt block, recomputed", 1.08
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}

Clock = Callable[[], float]

Times = dict[str, float]
"""Seconds per op kind, summed over the microbatches of one round."""


class Recomputed(nn.Module):
    """A module with activation checkpointing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.module, x, use_reentrant=False)
        return found


def stages() -> dict[str, tuple[nn.Module, Tensor]]:
    """Name → stage and one microbatch."""
    mlp = nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(384, 384), nn.LayerNorm(384), nn.GELU()))
    )
    conv = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 16, 3, padding=1),
        nn.BatchNorm2d(16),
    )
    return {
        "gpt block 256×128": (Block(256, 4), torch.randn(2, 128, 256)),
        RECOMPUTED: (Recomputed(Block(256, 4)), torch.randn(2, 128, 256)),
        "mlp 4×384": (mlp, torch.randn(256, 384)),
        "convolutions": (conv, torch.randn(4, 16, 24, 24)),
    }


def runner_round(runner: StageRunner, x: Tensor, clock: Clock) -> Times:
    """One round with a runner; ``BW`` is B and W of all microbatches."""
    times = {"F": 0.0, "B": 0.0, "W": 0.0}

    def timed(kind: str, call: Callable[[], Any]) -> Any:
        start = clock()
        result = call()
        times[kind] += clock() - start
        return result

    outputs = [timed("F", lambda k=k: runner.forward(k, (x,))) for k in range(MICROBATCHES)]
    for k, out in enumerate(outputs):
        timed("B", lambda k=k, out=out: runner.backward_input(k, out))
        timed("W", lambda k=k: runner.backward_weight(k))
    return times


def peer_round(module: nn.Module, x: Tensor, clock: Clock) -> Times:
    """The same with the functions torch's own zero-bubble schedules call."""
    from torch.distributed.pipelining import _backward as peer

    times = {"F": 0.0, "B": 0.0, "W": 0.0}
    flights = []
    start = clock()
    for _ in range(MICROBATCHES):
        leaf = x.detach().requires_grad_()
        flights.append((leaf, module(leaf)))
    times["F"] = clock() - start
    for leaf, out in flights:
        start = clock()
        _, groups = peer.stage_backward_input(
            [out], [out.detach().clone()], [leaf], module.parameters()
        )
        middle = clock()
        peer.stage_backward_weight(module.parameters(), groups)
        times["B"] += middle - start
        times["W"] += clock() - middle
    return times


def measure(module: nn.Module, x: Tensor, rounds: int, clock: Clock) -> dict[str, dict[str, float]]:
    """Milliseconds per microbatch and ratios to the unsplit backward, per way."""
    ways: dict[str, Callable[[], Times]] = {}
    for mode in ("fused", "module", "graph"):
        try:
            runner = StageRunner(
                module, is_first=False, is_last=False, microbatches=MICROBATCHES, mode=mode
            )
        except RuntimeError:
            continue  # no Linear: there is no module split
        ways[mode] = lambda runner=runner: runner_round(runner, x, clock)
    try:
        peer_round(module, x, clock)
        ways["torch's graph split"] = lambda: peer_round(module, x, clock)
    except (ImportError, RuntimeError):
        pass
    runs: dict[str, list[Times]] = {way: [] for way in ways}
    order = list(ways)
    for index in range(rounds + 2):
        for way in order[index % len(order) :] + order[: index % len(order)]:
            module.zero_grad()
            times = ways[way]()
            if index >= 2:  # warmed up
                runs[way].append(times)
    base = [times["B"] for times in runs["fused"]]
    table = {}
    for way, all_times in runs.items():
        row = {
            f"{kind}_ms": median(t[kind] for t in all_times) / MICROBATCHES * 1e3
            for kind in ("F", "B", "W")
        }
        pairs = list(zip(all_times, base, strict=True))
        row["B_ratio"] = median(t["B"] / b for t, b in pairs)
        row["W_ratio"] = median(t["W"] / b for t, b in pairs)
        row["BW_ratio"] = median((t["B"] + t["W"]) / b for t, b in pairs)
        fused_forward = [t["F"] for t in runs["fused"]]
        row["F_ratio"] = median(t["F"] / f for t, f in zip(all_times, fused_forward, strict=True))
        table[way] = row
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="cpu")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    results = {}
    print(
        f"torch {torch.__version__}, CPU, {args.threads} thread(s), {args.rounds} rounds, "
        f"{args.clock} time"
    )
    print(f"{'stage':23}{'way':22}{'F ms':>8}{'B ms':>8}{'W ms':>8}{'F/F':>8}{'B+W/full':>10}")
    for name, (module, x) in stages().items():
        results[name] = measure(module, x, args.rounds, CLOCKS[args.clock])
        for way, row in results[name].items():
            print(
                f"{name:23}{way:22}{row['F_ms']:8.2f}{row['B_ms']:8.2f}{row['W_ms']:8.2f}"
                f"{row['F_ratio']:8.2f}{row['BW_ratio']:10.2f}"
            )
    if args.json:
        args.json.write_text(json.dumps({"torch": torch.__version__, "stages": results}, indent=1))
    ratios = {way: row["BW_ratio"] for way, row in results[RECOMPUTED].items()}
    kept = ratios["module"] <= MOST
    peer = ratios.get("torch's graph split")
    beside = f"; torch's split {peer:.2f}×" if peer else ""
    print(
        f"{'ok ' if kept else 'NO '} {ratios['module']:.2f}×: with checkpointing at most {MOST}× "
        f"the unsplit backward{beside}"
    )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
