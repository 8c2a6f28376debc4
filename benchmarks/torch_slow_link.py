"""Slow last link: ``torch.distributed.pipelining`` at its best against the closed loop.

One command: ``python benchmarks/torch_slow_link.py [--json FILE] [--iterations N]``. Eight stages
that sleep for the op times of ``slow_link.py``, 24 microbatches, and 60 ms for every message of the
last link. torch runs its own schedules, runtime and stages; only the transport of its messages is
replaced: each queue carries one transfer at a time, as a communicator of NCCL does, and a transfer
of the last link takes 60 ms longer. By default a pair of ranks has one queue; with
``TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P=1`` each direction has its own. PipeMorph is one
``pipemorph run`` of ``slow_link.py``, whose fault trace delays the link as much: it finds the link
during the run. Exits 1 unless it is 3 times as fast as torch's default and twice as its best.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from goals import finish_benchmark, make_parser
from ranks import run_ranks
from slow_link import MICROBATCHES, OURS, STAGES, TIMES, VARIANTS, run_delays

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/support"))

DELAY_MS = 60.0
FASTER_THAN_DEFAULT, FASTER_THAN_BEST = 3.0, 2.0
DEADLINE_SECONDS = 500
WIDTH = 64
SCHEDULES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "1F1B": ("Schedule1F1B", {}, False),
    "zero bubble": ("ScheduleInterleavedZeroBubble", {}, False),
    "1F1B, queue per direction": ("Schedule1F1B", {}, True),
    "zero bubble, queue per direction": ("ScheduleInterleavedZeroBubble", {}, True),
    "zero bubble, queue per direction, deferred receives": (
        "ScheduleInterleavedZeroBubble", {"defer_pp_recv": True}, True,
    ),
}  # fmt: skip
"""Schedule of torch, its options, and True if each direction has a queue."""


class QueuedTransfer:
    """Work of one call, for which torch's schedules wait."""

    def __init__(self, ops: list[Any]) -> None:
        self.ops, self._over = ops, threading.Event()

    def execute(self, delay: float) -> None:
        for work in [op.op(op.tensor, op.peer, op.group, op.tag) for op in self.ops]:
            work.wait()
        time.sleep(delay)
        self._over.set()

    def wait(self) -> None:
        if not self._over.wait(DEADLINE_SECONDS):
            raise TimeoutError(f"a transfer was not over after {DEADLINE_SECONDS} s")


class TransferQueues:
    """Replacement of torch's runtime function that carries sends and receives."""

    def __init__(self, rank: int) -> None:
        self._rank, self.per_direction = rank, False
        self._queues: dict[Any, SimpleQueue[QueuedTransfer]] = {}

    def submit(self, ops: list[Any], desc: str | None = None) -> list[QueuedTransfer]:
        import torch.distributed as dist

        batches: dict[Any, list[Any]] = {}
        for op in ops:
            sends = op.op is dist.isend
            way = (self._rank, op.peer) if sends else (op.peer, self._rank)
            batches.setdefault(way if self.per_direction else frozenset(way), []).append(op)
        found = []
        for key, batch in batches.items():
            found.append(QueuedTransfer(batch))
            self._start_queue(key).put(found[-1])
        return found

    def _start_queue(self, key: Any) -> SimpleQueue[QueuedTransfer]:
        if key not in self._queues:
            queue: SimpleQueue[QueuedTransfer] = SimpleQueue()
            delay = DELAY_MS / 1e3 if set(key) == {STAGES - 2, STAGES - 1} else 0.0

            def run_queue() -> None:
                while True:
                    queue.get().execute(delay)

            threading.Thread(target=run_queue, daemon=True).start()
            self._queues[key] = queue
        return self._queues[key]


def rank_main(iterations: int) -> None:
    """Program of a rank; rank 0 prints a line of JSON per schedule."""
    import torch
    import torch.distributed as dist
    from sleeping_stages import make_sleeping_stage
    from torch.distributed.pipelining import schedules

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    forward, backward, weight = (
        TIMES[k] / 1e3 for k in ("forward", "backwardInput", "backwardWeight")
    )
    queues = TransferQueues(rank)
    x = torch.ones(MICROBATCHES, WIDTH)
    for name, (kind, options, queues.per_direction) in SCHEDULES.items():
        stage = make_sleeping_stage(rank, STAGES, forward=forward, backward=backward, weight=weight)
        given = stage if kind == "Schedule1F1B" else [stage]
        schedule = getattr(schedules, kind)(
            given, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss, **options
        )
        times = []
        for iteration in range(iterations + 1):
            if iteration == 1:
                # The first iteration exchanges shapes.
                schedules._batch_p2p, own = queues.submit, schedules._batch_p2p
            dist.barrier()
            began = time.monotonic()
            schedule.step(*([x] if rank == 0 else []), target=x if rank == STAGES - 1 else None)
            dist.barrier()
            times.append(time.monotonic() - began)
        schedules._batch_p2p = own
        if rank == 0:
            print(json.dumps([name, times[1:]]), flush=True)
    dist.destroy_process_group()


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--iterations", type=int, default=4, help="per schedule of torch")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args.iterations)
        return 0
    flags = ["--iterations", str(args.iterations)]
    printed = run_ranks(__file__, STAGES, flags, DEADLINE_SECONDS)
    torchs: dict[str, list[float]] = dict(map(json.loads, printed.splitlines()))
    with tempfile.TemporaryDirectory() as folder:
        row = run_delays(next(each for each in VARIANTS if each.name == OURS), Path(folder))
    ours = row.seconds[f"{DELAY_MS:g}"]
    print(
        f"{STAGES} stages that sleep, {MICROBATCHES} microbatches, {DELAY_MS:g} ms on the last "
        f"link, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; medians of {args.iterations}"
    )
    print("| | iteration | spread | pipemorph is faster by |\n|---|---:|---:|---:|")
    medians = {name: statistics.median(times) for name, times in torchs.items()}
    for name, times in torchs.items():
        spread = f"{min(times) * 1e3:.0f}–{max(times) * 1e3:.0f}"
        print(
            f"| torch: {name} | {medians[name] * 1e3:.0f} ms | {spread} | "
            f"{medians[name] / ours:.2f}× |"
        )
    print(f"| pipemorph, emulated stages | {ours * 1e3:.0f} ms | | |")
    default = min(medians[name] for name, (_, _, own) in SCHEDULES.items() if not own) / ours
    best = min(medians.values()) / ours
    goals = [
        (f"{found:.2f}×: at least {wanted}× as fast as torch's {what}", found >= wanted)
        for what, found, wanted in (
            ("default", default, FASTER_THAN_DEFAULT),
            ("best", best, FASTER_THAN_BEST),
        )
    ]
    return 0 if finish_benchmark(goals, args.json, {"torch": torchs, "ours": ours}) else 1


if __name__ == "__main__":
    sys.exit(main())
