"""Iteration time of this trainer against ``torch.distributed.pipelining``, no straggler.

One command: ``python benchmarks/torch_peer.py [--json FILE] [--rounds N]``. Four stages of a
GPT run the same batches on the same gloo ranks under torch's Schedule1F1B and
ScheduleInterleavedZeroBubble (one stage per rank) and under this trainer's 1f1b and
zero-bubble, in turn within each round. The ratio is taken round by round and its median is
printed. Exits 1 if a ratio is above 1.05.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ranks import run_ranks

STAGES, LAYERS, MICROBATCHES = 4, 8, 8
LIMIT = 1.05
DEADLINE_SECONDS = 600
PAIRS = (("1F1B", "1f1b"), ("InterleavedZeroBubble", "zero-bubble"))
"""torch's schedule and ours."""


def rank_main(rounds: int, iterations: int) -> None:
    """What every rank runs; rank 0 prints one line of JSON per measurement."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import (
        PipelineStage,
        Schedule1F1B,
        ScheduleInterleavedZeroBubble,
    )

    from pipemorph_trainer import Pipeline, TrainerContext
    from pipemorph_trainer.examples.gpt import Arguments, GPTStage, loss_fn

    context = TrainerContext.from_env()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    arguments = Arguments(width=192, sequence=128, microbatch_size=4)
    tokens = torch.randint(0, 256, (4 * MICROBATCHES, 129), generator=torch.Generator())
    x, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    first, last = context.rank == 0, context.rank == STAGES - 1

    def module() -> torch.nn.Module:
        torch.manual_seed(context.rank)
        return GPTStage(arguments, context.rank, STAGES, LAYERS)

    steps: dict[str, tuple[torch.nn.Module, Callable[[], float | None]]] = {}
    pipes = []
    for theirs, ours in PAIRS:
        mine, other = module(), module()
        pipe = Pipeline(
            mine, context=context, loss_fn=loss_fn, microbatches=MICROBATCHES, policy=ours
        )
        pipes.append(pipe)
        stage = PipelineStage(other, context.rank, STAGES, torch.device("cpu"))
        schedule = (
            Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
            if theirs == "1F1B"
            else ScheduleInterleavedZeroBubble([stage], MICROBATCHES, loss_fn=loss_fn)
        )

        def step_ours(pipe: Pipeline = pipe) -> float:
            return float(pipe.step(x, target=target))

        def step_theirs(schedule: Schedule1F1B = schedule) -> float | None:
            losses: list[torch.Tensor] = []
            if first:
                schedule.step(x)
            elif last:
                schedule.step(target=target, losses=losses)
            else:
                schedule.step()
            return float(torch.stack(losses).mean()) if last else None

        steps[f"ours {ours}"] = (mine, step_ours)
        steps[f"torch {theirs}"] = (other, step_theirs)
    for _ in range(rounds + 1):
        for name, (model, step) in steps.items():
            dist.barrier()
            began = time.monotonic()
            for _ in range(iterations):
                step()
                model.zero_grad()
                # As in training: everybody waits for the gradient norm.
                dist.all_reduce(torch.zeros(1))
            if context.rank == 0:
                print(json.dumps([name, (time.monotonic() - began) / iterations]), flush=True)
    for pipe in pipes:
        pipe.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=3, help="per schedule and round")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args.rounds, args.iterations)
        return 0
    flags = ["--rounds", str(args.rounds), "--iterations", str(args.iterations)]
    times: dict[str, list[float]] = {}
    for line in run_ranks(__file__, STAGES, flags, DEADLINE_SECONDS).splitlines():
        name, seconds = json.loads(line)
        times.setdefault(name, []).append(seconds)
    print(
        f"{STAGES} stages of a GPT, {MICROBATCHES} microbatches, gloo, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}; medians of {args.rounds} rounds"
    )
    print("| torch.distributed.pipelining | this trainer | ratio |\n|---:|---:|---:|")
    figures, kept = [], True
    for theirs, ours in PAIRS:
        # The first round exchanges shapes and tests the split.
        a, b = times[f"torch {theirs}"][1:], times[f"ours {ours}"][1:]
        ratio = statistics.median(mine / other for mine, other in zip(b, a, strict=True))
        kept = kept and ratio <= LIMIT
        print(
            f"| {theirs} {statistics.median(a) * 1e3:.0f} ms | {ours} "
            f"{statistics.median(b) * 1e3:.0f} ms | {ratio:.2f}× |"
        )
        figures.append({"torch": theirs, "ours": ours, "ratio": ratio, "a": a, "b": b})
    print(f"{'ok ' if kept else 'NO '} at most {LIMIT}× torch.distributed.pipelining")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
