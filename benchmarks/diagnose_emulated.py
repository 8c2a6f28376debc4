"""`pipemorph diagnose` on folders of emulated runs with known faults.

One command: ``python benchmarks/diagnose_emulated.py [--case NAME] [--json FILE]``. Each case is a
run of ``pipemorph run`` whose stages are emulated. In its second half a fault is there: a slow
worker, a slow link, varying lengths, garbage collections, a slow loader; a stage is long from the
beginning. The cost of the fault is the difference between the mean iterations of both halves, for
the long stage between those of two runs, as rank 0 measured them. The first cause that is named
must be the fault, its cost within 5 %, and since the right step.
"""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from goals import finish_benchmark, make_parser

from pipemorph.reproduce.emulated_runs import DEADLINE_SECONDS, run_job

STAGES, MICROBATCHES, ITERATIONS = 4, 8, 16
HALF = ITERATIONS // 2
OP_MS = 40.0
TOLERANCE = 0.05
SLOW_STAGE, FACTOR, DELAY_MS, SPREAD = 2, 1.5, 60.0, 0.4
LOAD_SECONDS, PAUSE_SECONDS = 0.4, 0.3


class Case(NamedTuple):
    """A fault. ``cause``, ``where``: begins of what must be named. ``faults``: of the job."""

    name: str
    cause: str
    where: str
    replicas: int = 1
    faults: tuple[dict[str, Any], ...] = ()
    since: tuple[int | None, ...] = (HALF,)
    """Steps that may be named as the first one, None for none: lengths may cost little in some."""


_DEVICE = {"slowdown": FACTOR, "fromIteration": HALF}
CASES = (
    Case(
        "slow worker", "slow worker", f"stage {SLOW_STAGE} of dp_rank 1", 2,
        ({"device": STAGES + SLOW_STAGE, **_DEVICE},),
    ),
    Case("long stage", "long stage", f"stage {SLOW_STAGE}", since=(None,)),
    Case(
        "slow link", "slow link", "stage 1 to 2", 1,
        ({"link": 1, "delayMs": DELAY_MS, "fromIteration": HALF},),
    ),
    Case(
        "varying lengths", "varying lengths", "microbatches take",
        since=(None, HALF, HALF + 1, HALF + 2),
    ),
    Case("gc", "gc", "dp0-stage1"),
    Case("slow loader", "slow loader", "dp0-stage0"),
)  # fmt: skip


def make_manifest(case: Case) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "parallelism": {
            "stages": STAGES, "replicas": case.replicas, "order": ["dp_replicate", "pp"],
        },
        "schedule": {"microbatches": MICROBATCHES, "policy": "1f1b"},
        "adaptation": {"enabled": False},
        "trainer": {
            "command": ["python", str(Path(__file__).resolve()), "--rank", case.name],
            "iterations": ITERATIONS, "threads": 1,
        },
        "faults": list(case.faults),
    }  # fmt: skip
    times = dict.fromkeys(("forward", "backwardInput", "backwardWeight"), OP_MS)
    spec["emulation"] = {"stageTimes": [times], "messageBytes": 4096, "gradientBytes": 1 << 16}
    return {
        "apiVersion": "pipemorph.io/v1alpha1", "kind": "PipeMorphJob",
        "metadata": {"name": case.name.replace(" ", "-")}, "spec": spec,
    }  # fmt: skip


def rank_main(case: str) -> None:
    """Program of a rank."""
    from pipemorph_trainer import EmulatedStage, Options, Pipeline, TrainerContext

    context = TrainerContext.from_env()
    assert context.job is not None
    stage = context.coordinate().stage
    garbage = make_garbage() if case == "gc" and stage == 1 else []
    emulated = EmulatedStage.from_spec(context.job.spec, stage=stage)
    # With "auto" the trainer would freeze the objects, and collections cost nothing.
    with Pipeline(emulated, context=context, options=Options(gc="off")) as pipe:
        for number in range(pipe.start_iteration, ITERATIONS):
            faulty = number >= HALF
            work = [1.0] * MICROBATCHES
            if faulty and case == "varying lengths":
                work = draw_work(number)
            elif case == "long stage" and stage == SLOW_STAGE:
                work = [FACTOR] * MICROBATCHES
            elif faulty and case == "slow loader" and not stage:
                time.sleep(LOAD_SECONDS)
            elif faulty and garbage:
                gc.collect()
            pipe.step(work=work)
            pipe.clip_grad_norm_(1.0)


def make_garbage() -> list[Any]:
    """Make so many objects that a collection takes ``PAUSE_SECONDS``."""
    found: list[Any] = []
    while True:
        found += [[] for _ in range(200_000)]
        began = time.perf_counter()
        gc.collect()
        if time.perf_counter() - began > PAUSE_SECONDS:
            return found


def draw_work(iteration: int) -> list[float]:
    """Lengths of the microbatches of an iteration, mean 1."""
    draw = random.Random(iteration)
    lengths = [draw.uniform(1 - 1.5 * SPREAD, 1 + 1.5 * SPREAD) for _ in range(MICROBATCHES)]
    return [length / fmean(lengths) for length in lengths]


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Run a case and diagnose its folder."""
    job = make_manifest(case)
    report = run_job(folder, job)
    done = subprocess.run(
        [sys.executable, "-m", "pipemorph.cli", "diagnose", str(folder / job["metadata"]["name"]),
         "--output", "json"],
        stdout=subprocess.PIPE, text=True, timeout=DEADLINE_SECONDS, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    seconds = [each["seconds"] for each in report["iterations"]]
    if case.since == (None,):
        if not UNDISTURBED:
            UNDISTURBED.append(measure_undisturbed(folder))
        clean, faulty = UNDISTURBED, seconds[1:]
    else:
        # The time between two iterations is that of the first one.
        clean, faulty = seconds[1 : HALF - 1], seconds[HALF - 1 :]
    cost = sum(each - median(clean) for each in faulty) / len(found["steps"])
    causes = found["causes"]
    first = causes[0] if causes else {"cause": "none", "where": "", "seconds": 0, "since_step": 0}
    return {
        "case": case.name, "first": f"{first['cause']}, {first['where']}", "cost": cost,
        "seconds": first["seconds"], "since": first["since_step"],
        "clean": median(clean), "faulty": fmean(faulty),
        "named": first["cause"] == case.cause and first["where"].startswith(case.where),
    }  # fmt: skip


UNDISTURBED: list[float] = []
"""Seconds of an iteration without a fault."""


def measure_undisturbed(folder: Path) -> float:
    """Run a job without a fault. Returns the seconds of its median iteration."""
    report = run_job(folder, make_manifest(Case("undisturbed", "", "")))
    return median(each["seconds"] for each in report["iterations"][1:])


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2])
        return 0
    parser = make_parser(__doc__)
    parser.add_argument("--case", choices=[case.name for case in CASES], help="only this one")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="leave the folders of the runs here"
    )
    args = parser.parse_args()
    goals, figures = [], []
    print("| fault | first cause | its cost, ms a step | injected | since |\n|---|---|---|---|---|")
    for case in CASES:
        if args.case not in (None, case.name):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder = args.out / case.name.replace(" ", "-") if args.out else Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            found = run_case(case, folder)
        figures.append(found)
        print(
            f"| {case.name} | {found['first']} | {1e3 * found['seconds']:.1f} |"
            f" {1e3 * found['cost']:.1f} | {found['since']} |",
            flush=True,
        )
        right = abs(found["seconds"] - found["cost"]) <= TOLERANCE * found["cost"]
        goals.append(
            (
                f"{case.name}: named first, and since when",
                found["named"] and found["since"] in case.since,
            )
        )
        goals.append((f"{case.name}: cost within {TOLERANCE:.0%}", right))
    return 0 if finish_benchmark(goals, args.json, figures) else 1


if __name__ == "__main__":
    sys.exit(main())
