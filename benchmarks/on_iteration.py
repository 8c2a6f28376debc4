"""What a callback per iteration costs training.

One command: ``python benchmarks/on_iteration.py [--iterations N] [--json FILE]``. Two emulated
stages, 8 microbatches and ops of 2 ms: iterations of some 60 ms. Rank 0 calls, in turn and for one
iteration each: nothing; a function that does nothing; :class:`TensorBoard`, which writes to a disk;
and one that waits for 50 ms, as for a far server. Printed are the medians of the iterations' times
over that with nothing, as the callers measured them, and the time for which the main thread is held
up: an entry in a queue. Turns of one iteration each, since other load on the machine then meets
all of them alike.

Exits 1 if a ratio is above 1.02, or the main thread is held up for more than 0.1 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAGES, MICROBATCHES, OP_SECONDS, WARM_UP = 2, 8, 0.002, 8
NAMES = ("nothing", "a function", "TensorBoard", "waits for 50 ms")
MOST_RATIO, MOST_SECONDS = 1.02, 1e-4
DEADLINE_SECONDS = 600


def rank_main(iterations: int) -> None:
    """What every rank runs. Rank 0 prints a line of JSON: seconds by name, and of the entry."""
    from torch.utils.tensorboard import SummaryWriter

    from pipemorph.wire import IterationSample
    from pipemorph_trainer import EmulatedStage, Pipeline, TrainerContext
    from pipemorph_trainer.trackers import FinishedIteration, TensorBoard

    context = TrainerContext.from_env()
    logs = SummaryWriter(tempfile.mkdtemp(prefix="pipemorph-"))

    def wait(_: FinishedIteration) -> None:
        time.sleep(0.05)

    calls: list[Callable[[FinishedIteration], object]] = [
        lambda _: None, lambda _: None, TensorBoard(logs), wait,
    ]  # fmt: skip

    def in_turn(finished: FinishedIteration) -> None:
        calls[finished.index % len(NAMES)](finished)

    pipe = Pipeline(
        EmulatedStage(OP_SECONDS, OP_SECONDS, OP_SECONDS, message_bytes=4096),
        context=context, microbatches=MICROBATCHES, on_iteration=in_turn,
    )  # fmt: skip
    told: Any = pipe._parts.listeners
    enter, listeners = told.finished, told._listeners
    entries: list[float] = []
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}

    def timed(sample: IterationSample) -> None:
        index = sample.index
        if index > WARM_UP:
            # The call for an iteration is made while the next one runs.
            seconds[NAMES[(index - 1) % len(NAMES)]].append(sample.seconds)
        told._listeners = listeners if index % len(NAMES) else ()
        began = time.perf_counter()
        enter(sample)
        if told._listeners:
            entries.append(time.perf_counter() - began)

    told.finished = timed
    for _ in range(WARM_UP + iterations):
        pipe.step()
    pipe.close()
    if context.rank == 0:
        print(json.dumps({"seconds": seconds, "entry": statistics.median(entries)}), flush=True)


def measure(iterations: int) -> dict[str, Any]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
    common = os.environ | {
        "WORLD_SIZE": str(STAGES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    command = [sys.executable, __file__, "--rank", "--iterations", str(iterations)]
    ranks = [
        subprocess.Popen(
            command, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(STAGES)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=DEADLINE_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"ranks ended with {[rank.returncode for rank in ranks]}")
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.iterations)
        return 0
    load = os.getloadavg()[0]
    found = measure(options.iterations)
    medians = {name: statistics.median(each) for name, each in found["seconds"].items()}
    # Of neighbours, which have met the same load.
    nothing = found["seconds"]["nothing"]
    ratios = {
        name: statistics.median(
            mine / other for mine, other in zip(found["seconds"][name], nothing, strict=False)
        )
        for name in NAMES[1:]
    }
    entry = found["entry"]
    print(f"| on_iteration, load {load:.0f} | median, ms | of that with nothing |\n|---|---|---|")
    for name in NAMES:
        ratio = f"{ratios[name]:.3f}" if name in ratios else ""
        print(f"| {name} | {1e3 * medians[name]:.2f} | {ratio} |")
    print(f"\nmain thread, per iteration: {1e6 * entry:.0f} µs")
    worst = max(ratios.values())
    well = {
        f"iterations take at most {MOST_RATIO} of those without": worst <= MOST_RATIO,
        f"the main thread waits at most {1e6 * MOST_SECONDS:.0f} µs": entry <= MOST_SECONDS,
    }
    for what, holds in well.items():
        print(f"{'ok' if holds else 'NO'} {what}")
    if options.json:
        options.json.write_text(json.dumps({"medians": medians, "ratios": ratios, "entry": entry}))
    return 0 if all(well.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
