"""Predicted gain of adapting a plain torch job, against what AdaptiveSchedule then gives.

    python benchmarks/observe_adapting.py [--rounds 2] [--schedule Schedule1F1B] [--json FILE]

Four stages that sleep for 25 ms per op, eight microbatches. A process group delays each message
between stages 1 and 2 by 60 ms. torch's own schedule trains, observed live by `pipemorph serve
--observe` and into op tables, and both predict a step under PipeMorph: `diagnose` with any memory
and within today's, `serve` with any. Then `pipemorph run` trains the
same stages by AdaptiveSchedule, with the same delay as a fault of the job, and without a limit of
microbatches in flight or with those of torch's schedule. Exits 1 if a median is more than 10 % from
its prediction.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from goals import finish_benchmark, make_parser
from ranks import hold_port, run_ranks

from pipemorph.diagnose.analysis.steps import StepSet
from pipemorph.diagnose.diagnosis import diagnose
from pipemorph.diagnose.formats.registry import load_recording
from pipemorph.diagnose.operation import BACKWARD, FORWARD, OPTYPES, WEIGHT
from pipemorph.reproduce.emulated_runs import run_job

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/support"))

STAGES, MICROBATCHES, WIDTH = 4, 8, 16
OP_SECONDS, DELAY_SECONDS = 0.025, 0.060
LINK = 1
OBSERVED_STEPS, ADAPTED_STEPS, SETTLED = 8, 14, 6
"""Steps of each job; the last ``SETTLED`` of the adapted one count."""
TOLERANCE = 0.1
DEADLINE_SECONDS = 120


def make_stage(rank: int, group: Any) -> Any:
    """Stage of torch's pipelining whose F, B and W sleep."""
    from sleeping_stages import make_sleeping_stage

    seconds = dict.fromkeys(("forward", "backward", "weight"), OP_SECONDS)
    return make_sleeping_stage(rank, STAGES, group=group, **seconds)


def train(schedule: Any, stage: Any, steps: int) -> list[float]:
    """Train, with a barrier between two steps, and return the seconds of each."""
    import torch
    import torch.distributed as dist

    optimizer = torch.optim.SGD(stage.submod.parameters(), 1e-3)
    x = torch.ones(MICROBATCHES, WIDTH)
    begins = []
    for _ in range(steps + 1):
        dist.barrier()
        begins.append(time.perf_counter())
        if len(begins) <= steps:
            schedule.step(*((x,) if stage.is_first else ()), target=x if stage.is_last else None)
            optimizer.step()
            optimizer.zero_grad()
    return [end - begin for begin, end in pairwise(begins)]


def train_torch(name: str, folder: str) -> None:
    """Program of a rank under torch's own schedule, observed."""
    import torch
    import torch.distributed as dist
    from delayed_group import make_delayed_group
    from torch.distributed.pipelining import schedules

    from pipemorph_trainer.observe import observe

    torch.set_num_threads(1)
    observation = observe(folder)
    dist.init_process_group("gloo")
    stage = make_stage(dist.get_rank(), make_delayed_group(LINK, DELAY_SECONDS))
    kind: Any = getattr(schedules, name)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    made = kind(stage if single else [stage], MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)
    seconds = train(made, stage, OBSERVED_STEPS)
    observation.stop()
    if stage.is_first:
        print(json.dumps(seconds), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def train_adaptive(file: str) -> None:
    """Program of a rank under ``pipemorph run``."""
    import torch

    from pipemorph_trainer import TrainerContext, make_mesh
    from pipemorph_trainer.torch import AdaptiveSchedule

    context = TrainerContext.from_env()
    mesh = make_mesh(context, torch.device("cpu"))
    stage = make_stage(context.rank, mesh.get_group("pp"))
    with AdaptiveSchedule([stage], MICROBATCHES, torch.nn.functional.mse_loss) as schedule:
        seconds = train(schedule, stage, ADAPTED_STEPS)
    if stage.is_first:
        Path(file).write_text(json.dumps(seconds))


def run_adaptive(folder: Path, limits: list[int] | None) -> list[float]:
    """Seconds of the settled steps under PipeMorph. ``limits``: of microbatches in flight."""
    file = folder / "seconds.json"
    job = {
        "apiVersion": "pipemorph.io/v1alpha1",
        "kind": "PipeMorphJob",
        "metadata": {"name": "any-memory" if limits is None else "same-memory"},
        "spec": {
            "parallelism": {"stages": STAGES},
            "schedule": {"microbatches": MICROBATCHES, "inFlightLimit": limits},
            "trainer": {
                "command": ["python", str(Path(__file__).resolve()), "--adaptive", str(file)],
                "iterations": ADAPTED_STEPS, "threads": 1,
            },
            "faults": [{"link": LINK, "delayMs": 1e3 * DELAY_SECONDS, "fromIteration": 0}],
        },
    }  # fmt: skip
    run_job(folder, job)
    seconds: list[float] = json.loads(file.read_text())
    return seconds[-SETTLED:]


def count_in_flight(steps: StepSet) -> list[int]:
    """Most microbatches in flight of each stage in the last step."""
    count, peaks = [0] * STAGES, [0] * STAGES
    names = [(OPTYPES[op.optype], op) for op in steps.steps[-1].ops]
    ends = {name for name, _ in names} & {BACKWARD, WEIGHT}
    for name, op in sorted(names, key=lambda each: each[1].start):
        stage = steps.workers[op.worker].stage
        if name == FORWARD:
            count[stage] += 1
        elif name == (WEIGHT if WEIGHT in ends else BACKWARD):
            count[stage] -= 1
        peaks[stage] = max(peaks[stage], count[stage])
    return peaks


@contextmanager
def serve_observed(folder: Path) -> Iterator[None]:
    """Follow the ranks of the context by ``pipemorph serve --observe``, until they have ended."""
    with hold_port() as port:
        variables = {
            "PIPEMORPH_INGEST_URL": f"http://127.0.0.1:{port}",
            "PIPEMORPH_TOKEN_FILE": str(folder / "token"),
        }
        command = [
            sys.executable, "-m", "pipemorph.cli", "serve", "--observe", "--listen",
            f"127.0.0.1:{port}", "--token-file", str(folder / "token"), "--out",
            str(folder / "served"),
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            # Its first lines say what the ranks need.
            server.stdout.readline()
            os.environ |= variables
            try:
                yield
                server.communicate(timeout=DEADLINE_SECONDS)
            finally:
                server.kill()
                for name in variables:
                    del os.environ[name]


def run_round(schedule: str, folder: Path) -> dict[str, Any]:
    """Observe torch's schedule, predict, and adapt, with any memory and within today's."""
    with serve_observed(folder):
        printed = run_ranks(__file__, STAGES, [schedule, str(folder / "ops")], DEADLINE_SECONDS)
    served = json.loads((folder / "served/report.json").read_text())
    found = diagnose(load_recording([folder / "ops"]))
    torchs = json.loads(printed.splitlines()[-1])[1:]
    rows: dict[str, Any] = {}
    for each in found.advice:
        if not each.adapts:
            continue
        limited = "memory" not in each.condition
        limits = count_in_flight(found.steps) if limited else None
        rows["today's" if limited else "any"] = {
            "predicted": each.predicted_seconds, "error": each.error, "gain": each.gain,
            "torch": torchs, "adapted": run_adaptive(folder, limits),
        }  # fmt: skip
    print(found.change)
    rows["any, by serve"] = served["adapting"] | {
        "torch": torchs,
        "adapted": rows["any"]["adapted"],
    }
    slow = [(each["link"], each["begin"]) for each in served["links"]["slow"]]
    print(f"serve: slow links and their first steps {slow}")
    return rows


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        train_torch(*sys.argv[2:])
        return 0
    if sys.argv[1:2] == ["--adaptive"]:
        train_adaptive(sys.argv[2])
        return 0
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--schedule", default="Schedule1F1B", help="of torch, one stage per rank")
    args = parser.parse_args()
    rounds = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as scratch:
            rounds.append(run_round(args.schedule, Path(scratch)))
    goals = []
    print("| memory | torch | predicted | with AdaptiveSchedule | spread | ratio |")
    print("|---|---:|---:|---:|---:|---:|")
    for memory in ("any", "any, by serve", "today's"):
        rows = [each[memory] for each in rounds if memory in each]
        if not rows:
            continue
        ratios = [second / row["predicted"] for row in rows for second in row["adapted"]]
        torchs = median(second for row in rows for second in row["torch"])
        adapted = [second for row in rows for second in row["adapted"]]
        predicted, error = (median(row[key] for row in rows) for key in ("predicted", "error"))
        ratio = median(ratios)
        print(
            f"| {memory} | {1e3 * torchs:.0f} ms | {1e3 * predicted:.0f} ± {1e3 * error:.0f} ms |"
            f" {1e3 * median(adapted):.0f} ms | {1e3 * min(adapted):.0f} to"
            f" {1e3 * max(adapted):.0f} ms | {ratio:.3f}, {min(ratios):.2f} to {max(ratios):.2f} |"
        )
        goals.append(
            (f"memory: {memory}: {ratio:.3f} times as predicted; at most {TOLERANCE:.0%} apart",
             abs(ratio - 1) <= TOLERANCE)
        )  # fmt: skip
    if len(goals) < 3:
        goals.append((f"{len(goals)} of 3 predictions were made", False))
    return 0 if finish_benchmark(goals, args.json, rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
