"""Idle time by cause, against what was injected.

One command: ``python benchmarks/idle.py [--json FILE]``. Four emulated stages run without a fault,
with a late link, with a slow device, with a slow loader on stage 0 and with microbatches whose work
varies; then the demo's GPT runs with its slow link. Each report has the idle time of about one
iteration a second by cause.

*Injected*: by how much more time a rank is idle with the fault than without it, in the planner's
simulation of the schedule: with the nominal times of the ops, and for the slow device with the time
that its ops were held. *Found*: by how much the cause's idle time exceeds that of the job without a
fault. *Other*: share of the idle time without a cause; in brackets the mean of its size in single
iterations, where errors do not cancel.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from time import sleep
from typing import Any

from goals import finish_benchmark, make_parser

from pipemorph.planning import Link, Problem, StageTimes, plan
from pipemorph.planning.simulation.simulator import simulate
from pipemorph.protocol.samples import IDLE_CAUSES, IterationSample, average_idle_time
from pipemorph.reproduce.emulated_runs import run_job
from pipemorph_trainer.examples.emulated import draw_work

ROOT = Path(__file__).resolve().parent.parent
STAGES, EACH, OP_MS, ITERATIONS, FIRST = 4, 8, 30.0, 32, 3
DELAY_MS = 25.0
FACTOR, SLOW_STAGE = 1.5, 2
LOAD_MS, SPREAD = 100.0, 0.6
MOST_OTHER, MOST_ERROR = 0.03, 0.1
"""Goals: share of ``other``, and relative error of the injected cause."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "no fault": ("", {}),
    "late links": (
        "link",
        {"faults": [{"link": i, "delayMs": DELAY_MS, "fromIteration": 0} for i in range(3)]},
    ),
    "slow device": (
        "stage",
        {"faults": [{"device": SLOW_STAGE, "slowdown": FACTOR, "fromIteration": 0}]},
    ),
    "slow loader": ("data", {"args": {"load_ms": LOAD_MS}}),
    "varying work": ("work", {"args": {"spread": SPREAD}}),
}
"""Cause and changes of the spec by case."""


def make_manifest(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    times = {"forward": OP_MS, "backwardInput": OP_MS, "backwardWeight": OP_MS}
    spec: dict[str, Any] = {
        "parallelism": {"stages": STAGES},
        "schedule": {"microbatches": EACH, "policy": "zero-bubble"},
        "trainer": {
            "command": ["python", str(Path(__file__).resolve()), "--rank"],
            "args": changes.get("args", {}), "iterations": ITERATIONS, "threads": 1,
        },
        "transport": {"route": "direct"},
        "emulation": {"stageTimes": [times], "messageBytes": 4096},
        "faults": changes.get("faults", []),
    }  # fmt: skip
    return {
        "apiVersion": "pipemorph.io/v1alpha1", "kind": "PipeMorphJob",
        "metadata": {"name": name.replace(" ", "-")}, "spec": spec,
    }  # fmt: skip


def make_demo() -> dict[str, Any]:
    """Make the job of ``make demo`` that adapts to a slow link."""
    found = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert found is not None and found.loader is not None
    demo = importlib.util.module_from_spec(found)
    found.loader.exec_module(demo)
    manifest: dict[str, Any] = demo.manifest(demo.OURS, demo.stages_here())
    return manifest


def sample_job(folder: Path, job: dict[str, Any]) -> tuple[list[IterationSample], float]:
    """Run a job. Returns its iterations after the first ones, and the seconds by which a fault made
    each op of a device longer."""
    report = run_job(folder, job)
    samples = [IterationSample.model_validate(each) for each in report["iterations"][FIRST:]]
    held = [
        each["hold_seconds"] / each["ops_held"] for each in report["faults"] if "device" in each
    ]
    return samples, sum(held)


def rank_main() -> None:
    """Program of a rank: emulated stages with a loader on stage 0."""
    from pipemorph_trainer import EmulatedStage, Pipeline, TrainerContext

    context = TrainerContext.from_env()
    assert context.job is not None
    spec, args = context.job.spec, context.args
    stage = context.coordinate().stage
    with Pipeline(EmulatedStage.from_spec(spec, stage=stage), context=context) as pipe:
        for iteration in range(pipe.start_iteration, spec.trainer.iterations):
            if stage == 0 and "load_ms" in args:
                sleep(args["load_ms"] / 1e3)
            if "spread" in args:
                work = draw_iteration(iteration)
                pipe.step(work=work, costs=work)
            else:
                pipe.step()
            pipe.clip_grad_norm_(1.0)


def draw_iteration(iteration: int) -> list[float]:
    """Draw the work of an iteration's microbatches, with mean 1."""
    work = draw_work(EACH, SPREAD, str(iteration))
    return [each / fmean(work) for each in work]


def simulate_idle_time(case: str, iteration: int, held: float = 0.0) -> float:
    """Simulate the mean idle seconds of a rank in an iteration. ``held``: seconds by which each op
    of the slow device was longer."""

    def make_stage(held: float = 0.0) -> StageTimes:
        op = OP_MS / 1e3 + held
        return StageTimes(forward=op, backward_input=op, backward_weight=op)

    delay = DELAY_MS / 1e3 if case == "late links" else 0.0
    calm = Problem(
        microbatches=EACH, stages=(make_stage(),) * STAGES, links=(Link(),) * (STAGES - 1),
        policy="zero-bubble",
    )  # fmt: skip
    work = tuple(draw_iteration(iteration)) if case == "varying work" else (1.0,) * EACH
    problem = calm.model_copy(
        update={
            "stages": tuple(
                make_stage(held if stage == SLOW_STAGE else 0.0) for stage in range(STAGES)
            ),
            "links": (Link(delay=delay, queues=1, outstanding=2),) * (STAGES - 1),
            "microbatch_costs": (work,),
        }
    )
    ran = simulate(plan(calm).schedule, problem)
    loading = LOAD_MS / 1e3 if case == "slow loader" else 0.0
    # The ranks wait for each other after each iteration.
    return ran.bubble_fraction * ran.makespan + loading


def summarize_case(samples: list[IterationSample], held: float) -> dict[str, Any]:
    """Summarize the sampled iterations of a run."""
    sampled = [each for each in samples if each.idle is not None]
    idle = average_idle_time(sampled)
    whole = sum(idle.values())
    size = fmean(abs(each.idle["other"]) for each in sampled if each.idle is not None)
    return {
        "sampled": [each.index for each in sampled], "idle": idle, "whole": whole,
        "seconds": fmean(each.seconds for each in sampled), "held": held,
        "other": abs(idle["other"]) / whole, "other_size": size / whole,
    }  # fmt: skip


def run_cases(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run all jobs. Yields each with its summary."""
    for name, (_, changes) in CASES.items():
        yield name, summarize_case(*sample_job(folder, make_manifest(name, changes)))
    yield "demo", summarize_case(*sample_job(folder, make_demo()))


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        rank_main()
        return 0
    args = make_parser(__doc__).parse_args()
    found: dict[str, Any] = {}
    print("| idle, ms an iteration | " + " | ".join(IDLE_CAUSES) + " | other, share |")
    print("|---" * (len(IDLE_CAUSES) + 2) + "|")
    with tempfile.TemporaryDirectory() as folder:
        for name, case in run_cases(Path(folder)):
            found[name] = case
            cells = [f"{1e3 * case['idle'][cause]:.1f}" for cause in IDLE_CAUSES]
            cells.append(f"{case['other']:.1%} ({case['other_size']:.1%})")
            print(f"| {name}, {1e3 * case['whole']:.0f} | " + " | ".join(cells) + " |", flush=True)
    goals = [
        (f"{name}: other is at most {MOST_OTHER:.0%}", case["other"] <= MOST_OTHER)
        for name, case in found.items()
    ]
    print()
    for name, (cause, _) in CASES.items():
        if not cause:
            continue
        case, calm = found[name], found["no fault"]
        injected = fmean(
            simulate_idle_time(name, index, case["held"]) - simulate_idle_time("no fault", index)
            for index in case["sampled"]
        )
        more = case["idle"][cause] - calm["idle"][cause]
        case |= {"injected": injected, "found": more}
        error = more / injected - 1
        print(
            f"{name}: {1e3 * injected:.1f} ms injected, {1e3 * more:.1f} ms found as {cause}"
            f" ({error:+.1%})"
        )
        within = f"{name}: {cause} within {MOST_ERROR:.0%} of what was injected"
        goals.append((within, abs(error) <= MOST_ERROR))
    return 0 if finish_benchmark(goals, args.json, found) else 1


if __name__ == "__main__":
    sys.exit(main())
