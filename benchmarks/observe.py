"""Cost of observing torch's pipelines, and what it records beside the profiler's trace.

    python benchmarks/observe.py [--rounds 30] [--json FILE]

Four ranks run torch's interleaved zero-bubble schedule over gloo, two stages each, eight
microbatches, ops of 20 ms that sleep. The cost is that of a hook, measured alone, times the number
of hooks in a step, over the step; as a check, steps are timed in turn with the hooks active and
not. Then one run is recorded by the observation and by torch.profiler: `pipemorph diagnose` of
both. Exits 1 if a goal does not hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from goals import finish_benchmark, make_parser

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/support")]

from profiled_pipelines import PipelineRun, profile_into  # noqa: E402

from pipemorph.diagnose.diagnosis import diagnose  # noqa: E402
from pipemorph.diagnose.diagnosis_json import diagnosis_to_json  # noqa: E402
from pipemorph.diagnose.formats.registry import load_recording  # noqa: E402
from pipemorph_trainer.observe.observation import MarkedOp, Observation  # noqa: E402
from pipemorph_trainer.observe.observed_rank import ObservedRank  # noqa: E402
from pipemorph_trainer.observe.torch_pipelines import ScheduleHooks  # noqa: E402

RANKS, CALLS = 4, 5000
MOST_SHARE = 0.002
MOST_DIFFERENCE = 0.02


def measure_hooks() -> dict[str, float]:
    """Microseconds that an op, a message and a wait take longer with hooks, and an op's row."""
    with tempfile.TemporaryDirectory() as folder:
        observation = Observation(Path(folder), 0)
        observation.set_place(ObservedRank(0, 0, 0, (0,)))
        hooks = ScheduleHooks(observation)
        stage = SimpleNamespace(stage_index=0, is_first=False, is_last=True)
        work = object()
        op = SimpleNamespace(tensor=SimpleNamespace(nbytes=64))
        owner = SimpleNamespace(
            compute=lambda stage, microbatch: None,
            list_ops=lambda stage, microbatch: [op],
            post=lambda ops: [work],
            wait=lambda works: None,
        )

        def exchange() -> None:
            owner.wait(owner.post(owner.list_ops(stage, 3)))

        def time_calls() -> tuple[float, float]:
            found = []
            for call in (lambda: owner.compute(stage, 3), exchange):
                began = perf_counter()
                for _ in range(CALLS):
                    call()
                found.append((perf_counter() - began) / CALLS)
            return found[0], found[1]

        plain = [time_calls() for _ in range(5)]
        observation.time_calls(owner, "compute", hooks.add_forward)
        observation.time_calls(owner, "list_ops", hooks.tag_messages("forward-recv"))
        observation.time_calls(owner, "post", hooks.note_posted)
        observation.replace(owner, "wait", hooks.wrap_wait)
        hooked = []
        for _ in range(5):
            hooked.append(time_calls())
            observation._ops.clear()
        op_, message = (
            min(each[k] for each in hooked) - min(each[k] for each in plain) for k in range(2)
        )
        for k in range(CALLS):
            observation.add(MarkedOp("forward-compute", 0.0, 1.0, k, 0))
        observation._calls = 1
        began = perf_counter()
        observation._begin_step()
        row = (perf_counter() - began) / CALLS
        observation.stop()
    return {"op": 1e6 * op_, "message": 1e6 * message, "row": 1e6 * row}


def diagnose_paths(paths: list[Path]) -> dict[str, Any]:
    """Diagnosis of traces, as `pipemorph diagnose` prints it in JSON."""
    fields: dict[str, Any] = diagnosis_to_json(diagnose(load_recording(paths)))
    return fields


def keep_steps(folder: Path, steps: int) -> None:
    """Keep the last ``steps`` steps before those that were timed in turn: what the profiler has."""
    for file in folder.glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        kept = [row for row in rows if 2 <= row["step"] < 2 + steps]
        file.write_text("".join(json.dumps(row) + "\n" for row in kept))


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=30, help=argparse.SUPPRESS)
    args = parser.parse_args()
    hooks = measure_hooks()
    run = PipelineRun("InterleavedZeroBubble", steps=5, rounds=args.rounds, times_observation=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = profile_into(folder, run, RANKS, timeout=300.0)
        keep_steps(folder / "ops", run.steps)
        rows = [json.loads(line) for line in (folder / "ops/rank1.jsonl").open()]
        by_profiler = diagnose_paths(sorted(folder.glob("*.json.gz")))
        by_hooks = diagnose_paths([folder / "ops"])
    ops = Counter(row["optype"].rpartition("-")[2] for row in rows if row["step"] == 2)
    messages = ops["recv"] + ops["send"]
    seconds = statistics.median(ranks[1].without)
    cost = 1e-6 * (
        (ops["compute"] + ops["weight"]) * hooks["op"]
        + messages * hooks["message"]
        + sum(ops.values()) * hooks["row"]
    )
    ratios = [a / b for a, b in zip(ranks[1].with_profiler, ranks[1].without, strict=True)]
    low, middle, high = statistics.quantiles(ratios)
    print(f"an op {hooks['op']:.2f} us, a message {hooks['message']:.2f}, a row {hooks['row']:.2f}")
    print(f"a step of {1e3 * seconds:.0f} ms: {dict(ops)}; cost {1e3 * cost:.3f} ms")
    print(
        f"{len(ratios)} steps in turn: {middle:.3f} times as long (quartiles {low:.3f}, {high:.3f})"
    )
    print("| | observed | torch.profiler |\n|---|---|---|")
    for key in ("slowdown", "bubble_fraction", "m_s", "m_w"):
        values = [
            "none" if each[key] is None else f"{each[key]:.4f}" for each in (by_hooks, by_profiler)
        ]
        print(f"| {key} | {' | '.join(values)} |")
    for each, found in (("observed", by_hooks), ("torch.profiler", by_profiler)):
        causes = [f"{c['cause']}, {c['where']}: {c['share']:.3f}" for c in found["causes"][:3]]
        print(f"{each}: {'; '.join(causes)}")
    difference = abs(by_hooks["slowdown"] / by_profiler["slowdown"] - 1)
    goals = [
        (f"hooks take {100 * cost / seconds:.3f} % of a step; at most {100 * MOST_SHARE} %",
         cost / seconds <= MOST_SHARE),
        (f"slowdown of both diagnoses differs by {100 * difference:.2f} %; at most "
         f"{100 * MOST_DIFFERENCE:.0f} %", difference <= MOST_DIFFERENCE),
    ]  # fmt: skip
    figures = {
        "hooks": hooks, "ops": ops, "step": seconds, "ratios": ratios, "observed": by_hooks,
        "profiler": by_profiler,
    }  # fmt: skip
    return 0 if finish_benchmark(goals, args.json, figures) else 1


if __name__ == "__main__":
    sys.exit(main())
