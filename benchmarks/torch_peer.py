"""Iteration time of this trainer against ``torch.distributed.pipelining``, no straggler.

One command: ``python benchmarks/torch_peer.py [--json FILE] [--rounds N]``. Four stages of a GPT,
with and without activation checkpointing, run the same batches on the same gloo ranks, in turn
within each round: under this trainer's 1f1b and zero-bubble, and under torch's Schedule1F1B and
ScheduleInterleavedZeroBubble (one stage per rank), each as they are by default and at their best:
with a communicator per directed edge (``TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P=1``) and, where the
schedule has it, receives deferred. The output lists variants that the installed torch lacks. Ours
is compared with the fastest one of torch. The ratio is taken round by round; its median and spread
are printed, and so are those of the processor time of all ranks, which other load on the machine
hardly changes. Exits 1 if a median of the iteration times is above 1.02.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from goals import finish_benchmark, make_parser
from ranks import run_ranks

STAGES, LAYERS, MICROBATCHES = 4, 8, 8
LIMIT = 1.02
DEADLINE_SECONDS = 1100
OURS = ("1f1b", "zero-bubble")
PEERS: dict[str, tuple[str, dict[str, bool], bool]] = {
    "1F1B": ("1f1b", {}, False),
    "1F1B, per edge": ("1f1b", {}, True),
    "zero bubble": ("zero-bubble", {}, False),
    "zero bubble, per edge, deferred receives": ("zero-bubble", {"defer_pp_recv": True}, True),
}
"""Variants of torch: our policy to compare with, options, and True for communicators per edge."""
RECOMPUTES = ("", "checkpointing")


class InstalledTorch(NamedTuple):
    """Features of the installed torch that :data:`PEERS` need. ``version``: version of torch."""

    version: str
    per_edge: bool
    options: tuple[str, ...]

    def explain_lack(self, name: str) -> list[str]:
        """List the features that a peer lacks, in words; empty if it can be compared."""
        _, options, per_edge = PEERS[name]
        edges = ["a communicator per edge"] if per_edge and not self.per_edge else []
        return edges + [option for option in options if option not in self.options]

    @property
    def comparable_peers(self) -> list[str]:
        """Peers that can be compared."""
        return [name for name in PEERS if not self.explain_lack(name)]


def rank_main(rounds: int, iterations: int) -> None:
    """Program of a rank; rank 0 prints a line of JSON per measurement."""
    import torch
    import torch.distributed as dist
    import torch.distributed.config as config
    from torch.distributed.pipelining import (
        PipelineStage,
        Schedule1F1B,
        ScheduleInterleavedZeroBubble,
    )
    from torch.utils.checkpoint import checkpoint

    from pipemorph_trainer import ModelShard, Pipeline, TrainerContext
    from pipemorph_trainer.examples.gpt import GPTArguments, GPTStage, loss_fn

    offered = InstalledTorch(
        torch.__version__,
        hasattr(config, "pipeline_per_edge_p2p"),
        tuple(inspect.signature(ScheduleInterleavedZeroBubble).parameters),
    )
    context = TrainerContext.from_env()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if context.rank == 0:
        print(json.dumps(offered), flush=True)
    arguments = GPTArguments(width=192, sequence=128, microbatch_size=4)
    tokens = torch.randint(0, 256, (4 * MICROBATCHES, 129), generator=torch.Generator())
    x, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    first, last = context.rank == 0, context.rank == STAGES - 1

    def make_module(recompute: str) -> torch.nn.Module:
        torch.manual_seed(context.rank)
        made = GPTStage(arguments, ModelShard(context.rank, STAGES), LAYERS)
        if recompute:
            for block in made.blocks.values():
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return made

    def step_torch(schedule: Schedule1F1B | ScheduleInterleavedZeroBubble) -> None:
        schedule.step(*([x] if first else []), target=target if last else None)

    steps: dict[str, tuple[torch.nn.Module, Callable[[], object]]] = {}
    pipes = []
    for recompute in RECOMPUTES:
        for policy in OURS:
            mine = make_module(recompute)
            pipe = Pipeline(
                mine, context=context, loss_fn=loss_fn, microbatches=MICROBATCHES, policy=policy
            )
            pipes.append(pipe)
            steps[f"{recompute}|ours|{policy}"] = mine, partial(pipe.step, x, target=target)
        for name in offered.comparable_peers:
            policy, options, per_edge = PEERS[name]
            other = make_module(recompute)
            if offered.per_edge:
                config.pipeline_per_edge_p2p = per_edge
            stage = PipelineStage(other, context.rank, STAGES, torch.device("cpu"))
            schedule = (
                Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
                if policy == "1f1b"
                else ScheduleInterleavedZeroBubble(
                    [stage], MICROBATCHES, loss_fn=loss_fn, **options
                )
            )
            steps[f"{recompute}|torch|{name}"] = other, partial(step_torch, schedule)
    for _ in range(rounds + 1):
        for name, (model, step) in steps.items():
            dist.barrier()
            began, busy = time.monotonic(), time.process_time()
            for _ in range(iterations):
                step()
                model.zero_grad()
                # As in training, all ranks wait for the gradient norm.
                dist.all_reduce(torch.zeros(1))
            took = time.monotonic() - began
            used = torch.tensor([time.process_time() - busy], dtype=torch.float64)
            dist.all_reduce(used)
            if context.rank == 0:
                print(json.dumps([name, took / iterations, float(used) / iterations]), flush=True)
    for pipe in pipes:
        pipe.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=3, help="per schedule and round")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args.rounds, args.iterations)
        return 0
    flags = ["--rounds", str(args.rounds), "--iterations", str(args.iterations)]
    times: dict[str, list[float]] = {}
    processor: dict[str, list[float]] = {}
    first, *lines = run_ranks(__file__, STAGES, flags, DEADLINE_SECONDS).splitlines()
    offered = InstalledTorch(*json.loads(first))
    for line in lines:
        name, seconds, used = json.loads(line)
        times.setdefault(name, []).append(seconds)
        processor.setdefault(name, []).append(used)
    print(
        f"{STAGES} stages of a GPT, {MICROBATCHES} microbatches, gloo, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}; medians of {args.rounds} rounds"
    )
    for name in PEERS:
        if lacks := offered.explain_lack(name):
            print(f"not compared: {name}; torch {offered.version} lacks {' and '.join(lacks)}")
    print(
        "| | this trainer | torch at its best | ratio | spread | of processor time | spread |\n"
        "|---|---:|---:|---:|---:|---:|---:|"
    )
    figures, all_hold = [], True
    for recompute in RECOMPUTES:
        for policy in OURS:
            # The first round exchanges shapes and tests the split.
            mine = times[f"{recompute}|ours|{policy}"][1:]
            peers = {
                name: times[f"{recompute}|torch|{name}"][1:]
                for name in offered.comparable_peers
                if PEERS[name][0] == policy
            }
            best = min(peers, key=lambda name: statistics.median(peers[name]))
            ratios = [a / b for a, b in zip(mine, peers[best], strict=True)]
            ratio = statistics.median(ratios)
            all_hold = all_hold and ratio <= LIMIT
            used = [
                a / b
                for a, b in zip(
                    processor[f"{recompute}|ours|{policy}"][1:],
                    processor[f"{recompute}|torch|{best}"][1:],
                    strict=True,
                )
            ]
            print(
                f"| {policy}{', ' if recompute else ''}{recompute} | "
                f"{statistics.median(mine) * 1e3:.0f} ms | {best}: "
                f"{statistics.median(peers[best]) * 1e3:.0f} ms | {ratio:.2f}× | "
                f"{min(ratios):.2f}–{max(ratios):.2f} | {statistics.median(used):.2f}× | "
                f"{min(used):.2f}–{max(used):.2f} |"
            )
            figures.append(
                {
                    "recompute": recompute,
                    "ours": policy,
                    "ratio": ratio,
                    "a": mine,
                    "peers": peers,
                    "processor": used,
                }
            )
    goal = f"at most {LIMIT}× torch.distributed.pipelining at its best"
    return 0 if finish_benchmark([(goal, all_hold)], args.json, figures) else 1


if __name__ == "__main__":
    sys.exit(main())
