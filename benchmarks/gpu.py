"""GPT on GPUs: step times per route, and the part of the copies that ops hide.

One command: ``python benchmarks/gpu.py [--stages N] [--json FILE]``, on a machine with a CUDA
device; without one, it exits 2 with a message. With a GPU per stage it compares four runs:

* *no messages*: length of the plan with the op times that each rank measures alone, all ranks
  concurrently, and links that take no time: a lower bound for all routes;
* *direct*: NCCL;
* *delegated tcp* and *shm*: all messages through host memory and the engine.

With fewer GPUs the ranks share them: then there is no direct route, processes take turns on a GPU,
and *no messages* is the time of all ranks for their ops, run concurrently. That shows the cost of
staging, not the part of it that it hides from the network.

*hidden* is the share of the copies between device and host that ran while a kernel ran on the same
GPU for the same rank, by the trace of torch.profiler.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from goals import finish_benchmark, make_parser
from ranks import run_ranks

if TYPE_CHECKING:
    import torch
    from torch.profiler import profile

    from pipemorph_trainer import Options, TrainerContext

DEADLINE_SECONDS = 900
WARM = 3
"""Steps before the timed ones, for shapes, measurements of the first iteration, pinned memory."""


def rank_main(args: argparse.Namespace) -> None:
    """Program of a rank; rank 0 prints a line of JSON."""
    import torch
    import torch.distributed as dist

    from pipemorph_trainer import ModelShard, Pipeline, TrainerContext
    from pipemorph_trainer.examples.gpt import GPTArguments, GPTStage, loss_fn

    context = TrainerContext.from_env()
    device = torch.device("cuda", context.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    shape = GPTArguments(
        width=args.width,
        heads=args.width // 128,
        sequence=args.sequence,
        microbatch_size=args.microbatch_size,
    )
    batch = args.microbatch_size * args.microbatches
    tokens = torch.randint(
        0, 256, (batch, args.sequence + 1), generator=torch.Generator().manual_seed(1)
    ).to(device)
    x, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def make_module() -> torch.nn.Module:
        torch.manual_seed(context.rank)
        stage = GPTStage(shape, ModelShard(context.rank, args.stages), args.layers)
        return stage.to(device=device, dtype=torch.bfloat16)

    own = torch.cuda.device_count() >= args.stages
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(device),
        "gpus": min(torch.cuda.device_count(), args.stages),
        "message_bytes": args.microbatch_size * args.sequence * args.width * 2,
        "runs": {},
    }
    ways = [("direct", "auto")] if own else []
    ways += [("delegated", "tcp"), ("delegated", "shm")]
    for route, engine in ways:
        pipe = Pipeline(
            make_module(),
            context=context,
            loss_fn=loss_fn,
            microbatches=args.microbatches,
            policy=args.policy,
            options=Options(route=route, engine=engine),  # type: ignore[arg-type]
        )
        with pipe:
            run = time_steps(pipe, x, target, args.iterations)
        all_runs: list[Any] = [None] * args.stages
        dist.all_gather_object(all_runs, run)
        name = route if route == "direct" else f"{route} {engine}"
        found["runs"][name] = {
            "seconds": statistics.median(all_runs[0]["seconds"]),
            "loss": all_runs[0]["loss"],
            "hidden": [each["hidden"] for each in all_runs],
            "copying_seconds": [each["copying"] for each in all_runs],
        }
    found["no_messages"] = compute_bound(
        context, make_module(), x=x, target=target, args=args, own=own
    )
    if context.rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def time_steps(pipe: Any, x: torch.Tensor, target: torch.Tensor, iterations: int) -> dict[str, Any]:
    """Step times of one run, then the trace of one more step."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    seconds = []
    loss = 0.0
    for iteration in range(WARM + iterations):
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = float(pipe.step(x, target=target))
        torch.cuda.synchronize()
        if iteration >= WARM:
            seconds.append(time.perf_counter() - began)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        pipe.step(x, target=target)
        torch.cuda.synchronize()
    hidden, copying = measure_overlap(trace)
    return {"seconds": seconds, "loss": loss, "hidden": hidden, "copying": copying}


def measure_overlap(trace: profile) -> tuple[float | None, float]:
    """Fraction of the copies' time in which a kernel also ran, and seconds of copying."""
    import torch

    kernels, copies = [], []
    for event in trace.events() or ():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        name = event.name.lower()
        where = (event.time_range.start, event.time_range.end)
        if "memcpy" in name and ("htod" in name or "dtoh" in name):
            copies.append(where)
        elif "memcpy" not in name and "memset" not in name and "nccl" not in name:
            kernels.append(where)
    total = sum(end - start for start, end in copies)
    if not total:
        return None, 0.0
    kernels.sort()
    merged: list[list[float]] = []
    for start, end in kernels:
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    both = sum(
        max(0.0, min(end, over) - max(start, began))
        for start, end in copies
        for began, over in merged
    )
    return both / total, total / 1e6


def compute_bound(
    context: TrainerContext,
    module: torch.nn.Module,
    *,
    x: torch.Tensor,
    target: torch.Tensor,
    args: argparse.Namespace,
    own: bool,
) -> float:
    """Seconds of a step whose messages take no time: see the module."""
    import torch
    import torch.distributed as dist

    from pipemorph.planning import Link, Policy, Problem, StageTimes, plan, simulate
    from pipemorph_trainer.examples.gpt import loss_fn
    from pipemorph_trainer.executor.module_runner import ModuleRunner

    first, last = context.rank == 0, context.rank == args.stages - 1
    runner = ModuleRunner(
        module,
        is_first=first,
        is_last=last,
        loss_fn=loss_fn if last else None,
        microbatches=args.microbatches,
    )
    size = args.microbatch_size
    shape = (size, args.sequence, args.width)
    given = x[:size] if first else torch.randn(shape, device=x.device, dtype=torch.bfloat16)
    grads = None if last else [torch.randn(shape, device=x.device, dtype=torch.bfloat16)]
    times: dict[str, list[float]] = {"F": [], "B": [], "W": []}
    marks: list[tuple[str, Any, Any]] = []

    def read_op_seconds(kind: str, run: Any) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        marks.append((kind, start, end))

    whole = 0.0
    together = dist.new_group(backend="gloo")
    for _ in range(2):
        module.zero_grad()
        torch.cuda.synchronize()
        dist.barrier(group=together)
        began = time.perf_counter()
        marks.clear()
        runner.begin_iteration(fused=frozenset())
        for m in range(args.microbatches):
            read_op_seconds("F", lambda m=m: runner.run_forward(m, (given,), {}, target[:size]))
            read_op_seconds("B", lambda m=m: runner.backward_input(m, grads))
            read_op_seconds("W", lambda m=m: runner.backward_weight(m))
        torch.cuda.synchronize()
        whole = time.perf_counter() - began
    for kind, start, end in marks:
        times[kind].append(start.elapsed_time(end))
    mine = {kind: statistics.median(each) for kind, each in times.items()}
    all_times: list[Any] = [None] * args.stages
    dist.all_gather_object(all_times, (mine, whole))
    if not own:
        return max(seconds for _, seconds in all_times)
    equal = Problem(
        microbatches=args.microbatches,
        stages=(StageTimes(forward=1, backward_input=1, backward_weight=1),) * args.stages,
        links=(Link(),) * (args.stages - 1),
    )
    problem = Problem(
        microbatches=args.microbatches,
        stages=tuple(
            StageTimes(forward=t["F"], backward_input=t["B"], backward_weight=t["W"])
            for t, _ in all_times
        ),
        links=(Link(),) * (args.stages - 1),
    )
    return simulate(plan(equal, Policy(args.policy)).schedule, problem).makespan / 1e3


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--microbatch-size", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--policy", default="zero-bubble")
    args = parser.parse_args()
    if args.rank:
        rank_main(args)
        return 0
    import torch

    if not torch.cuda.is_available():
        print("gpu: torch.cuda.is_available() is false here; this needs a CUDA device")
        return 2
    printed = run_ranks(__file__, args.stages, sys.argv[1:], DEADLINE_SECONDS)
    found = json.loads(printed.strip().splitlines()[-1])
    shared = "" if found["gpus"] >= args.stages else " (shared by the ranks)"
    print(
        f"{args.stages} stages on {found['gpus']} × {found['gpu']}{shared}, messages of "
        f"{found['message_bytes'] / 2**20:.0f} MiB, {args.microbatches} microbatches, "
        f"{args.policy}\n"
    )
    floor = found["no_messages"]
    print("| route | step | against no messages | copying per step | hidden |")
    print("|---|---:|---:|---:|---:|")
    print(f"| no messages | {floor * 1e3:.1f} ms | 1.00× | | |")
    for name, run in found["runs"].items():
        hidden = [each for each in run["hidden"] if each is not None]
        copying = f"{sum(run['copying_seconds']) * 1e3:.1f} ms | {min(hidden):.0%}"
        print(
            f"| {name} | {run['seconds'] * 1e3:.1f} ms | {run['seconds'] / floor:.2f}× | "
            f"{copying if hidden else '|'} |"
        )
    losses = {run["loss"] for run in found["runs"].values()}
    goal = f"losses of all runs are equal to the bit: {sorted(losses)}"
    print()
    return 0 if finish_benchmark([(goal, len(losses) == 1)], args.json, found) else 1


if __name__ == "__main__":
    sys.exit(main())
