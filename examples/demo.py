"""The main job, on this machine: what ``make demo`` runs.

1. A small GPT trains on real text, one pipeline stage per core (two to four). Link 0 is slow for
   a while: messages are late by the time of four forwards, whatever a forward takes here. The same
   job runs twice: as PipeMorph runs it, and with a fixed zero-bubble schedule.
2. Eight emulated stages with the op times of a 14B model, while the last link goes from 0 to 30
   to 60 ms: zero-bubble and PipeMorph. Nothing is computed here; the clock is real. The picture
   has the figures that the paper's authors measured beside these.

Leaves reports and pictures in the folder given with --out. Exits 1 if a run fails, if no plan
answered the slow link, or if the losses of the two runs differ.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from math import isnan
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from pipemorph.reproduce.published import list_iterations

ROOT = Path(__file__).resolve().parent.parent
ITERATIONS = 36
SLOW_FROM, SLOW_TO = 10, 24
DELAY_FORWARDS = 4
OURS, BASELINE = "pipemorph", "zero-bubble"

Report = dict[str, Any]


def step(title: str) -> None:
    print(f"\n== {title}", flush=True)


def stages_here() -> int:
    """One core each, so that a bubble costs what it would cost; two at least make a pipeline."""
    return max(2, min(4, os.cpu_count() or 2))


def manifest(policy: str, stages: int) -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((ROOT / "examples/gpt.yaml").read_text())
    spec = job["spec"]
    job["metadata"]["name"] = f"gpt-{policy}"
    spec["parallelism"] = {"stages": stages, "layers": 2 * stages}
    spec["schedule"]["policy"] = policy
    spec["trainer"]["iterations"] = ITERATIONS
    during = {"fromIteration": SLOW_FROM, "toIteration": SLOW_TO}
    spec["faults"] = [{"link": 0, **during, "delayForwards": DELAY_FORWARDS}]
    if policy != OURS:
        # As a pipeline without PipeMorph: torch.distributed only, and nothing is planned anew.
        spec["transport"] = {"route": "direct"}
        spec["adaptation"] = {"enabled": False}
    return job


def train(policy: str, stages: int, out: Path) -> Report | None:
    """The report of one run; None if it failed, which has been printed."""
    out.mkdir(parents=True, exist_ok=True)
    job = out / f"gpt-{policy}.yaml"
    job.write_text(yaml.safe_dump(manifest(policy, stages), sort_keys=False))
    where = out / f"gpt-{policy}"
    command = [sys.executable, "-m", "pipemorph.cli", "run", str(job)]
    done = subprocess.run([*command, "--out", str(where), "--force"], check=False)
    if done.returncode:
        print(f"demo: the run exited {done.returncode}; its logs are in {where / 'logs'}")
        return None
    report: Report = json.loads((where / "report.json").read_text())
    return report


def emulate(out: Path) -> int:
    """Run the emulated stages; the exit status."""
    bench = [sys.executable, str(ROOT / "benchmarks/slow_link.py"), "--short"]
    bench += ["--keep", str(out / "emulated"), "--json", str(out / "emulated.json")]
    return subprocess.run(bench, check=False).returncode


def answers(report: Report) -> list[int]:
    """Iterations in which a plan came into effect that was made for the slow link."""
    return [
        change["applied_at_iteration"]
        for change in report["adaptations"]
        if change["applied_at_iteration"] is not None
        and SLOW_FROM <= change["detected_at_iteration"] < SLOW_TO
        and any(link["link"] == 0 for link in change["links"])
    ]


def name_fault(report: Report) -> str:
    """The fault in words; the delay in milliseconds is the largest that a rank computed."""
    late = max((fault.get("delay_ms", 0.0) for fault in report.get("faults", [])), default=0.0)
    return f"late by {DELAY_FORWARDS} forwards" + (f" ({late:.0f} ms)" if late else "")


def find_speedup(ours: Report, baseline: Report) -> float:
    """Speed under the plan for the slow link, as a multiple of the baseline's in that time."""
    answered = min(answers(ours), default=SLOW_TO)
    return phases(baseline, answered)[2] / phases(ours, answered)[2]


def phases(report: Report, answered: int) -> list[float]:
    """Median seconds per iteration: before, slow without an answer, slow with one, after."""
    seconds = [iteration["seconds"] for iteration in report["iterations"]]
    parts = [
        seconds[4:SLOW_FROM],
        seconds[SLOW_FROM:answered],
        seconds[answered + 1 : SLOW_TO],
        seconds[SLOW_TO + 4 :],
    ]
    return [median(part) if part else float("nan") for part in parts]


def compare(ours: Report, baseline: Report) -> list[str]:
    """Print both runs, phase by phase, and every change of plan with its cause. Returns what is not
    as it should be, one line each."""
    wrong = []
    found = answers(ours)
    answered = min(found, default=SLOW_TO)
    head = ("", "before", "slow, old plan", "slow, new plan", "well again")
    print(f"\nseconds per iteration (median)\n{head[0]:24}" + "".join(f"{h:>16}" for h in head[1:]))
    for name, report in (("pipemorph", ours), ("zero-bubble, fixed", baseline)):
        cells = "".join(f"{_shown(value):>16}" for value in phases(report, answered))
        print(f"{name:24}{cells}")
    if found:
        print(
            f"link 0 was {name_fault(ours)} from iteration {SLOW_FROM}; the plan for it ran from "
            f"iteration {answered}: {find_speedup(ours, baseline):.2f}x the speed of zero-bubble "
            "until it was over"
        )
    else:
        wrong.append(
            f"link 0 was {name_fault(ours)} from iteration {SLOW_FROM} and no plan answered it; "
            "run it again if other programs kept the processors busy"
        )
    for change in ours["adaptations"]:
        at = change["applied_at_iteration"]
        when = "replaced before it ran" if at is None else f"from iteration {at}"
        caused = SLOW_FROM <= change["detected_at_iteration"] <= SLOW_TO + 4
        without = (
            "" if caused else " (no injected cause: the processors were busy, or op times changed)"
        )
        print(
            f"  plan v{change['plan_version']}, {when}: warm-up {change['warmup_before']} -> "
            f"{change['warmup_after']}{without}"
        )
    losses = [iteration["loss"] for iteration in ours["iterations"]]
    same = losses == [iteration["loss"] for iteration in baseline["iterations"]]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats/byte", end="")
    print("; the losses of the two runs are the same to the bit" if same else "")
    if not same:
        wrong.append("the losses of the two runs are not the same, which is a defect")
    return wrong


def _shown(seconds: float) -> str:
    return "none" if isnan(seconds) else f"{seconds:.3f}"


def draw(ours: Report, baseline: Report, path: Path) -> None:
    """Seconds per iteration of both runs, with the fault and the changes of plan."""
    from pipemorph.views.pictures import ChartLine, ChartSpan, draw_chart

    gained = find_speedup(ours, baseline)
    title = f"A GPT with link 0 {name_fault(ours)} from iteration {SLOW_FROM} to {SLOW_TO}"
    if gained > 1:  # Not if there is none.
        title += f": {gained:.1f}× faster with PipeMorph"
    lines = [
        # The first iteration has the start of everything.
        ChartLine(name, [(k, each["seconds"]) for k, each in enumerate(report["iterations"]) if k])
        for name, report in (("pipemorph", ours), ("zero-bubble, fixed", baseline))
    ]
    applied = [(change["plan_version"], change["applied_at_iteration"])
               for change in ours["adaptations"]]  # fmt: skip
    drawing = draw_chart(
        title, lines, x_name="iteration", y_name="seconds per iteration",
        spans=[ChartSpan(SLOW_FROM, SLOW_TO, f"link 0 {name_fault(ours)}")],
        marks=[(at, f"plan v{version}") for version, at in applied if at is not None],
    )  # fmt: skip
    path.write_bytes(drawing.to_png())


def draw_emulated(measured: Path, path: Path) -> None:
    """Iteration time of the emulated stages by delay, beside what the paper's authors measured."""
    from pipemorph.views.pictures import ChartLine, draw_chart

    rows: list[Report] = json.loads(measured.read_text())
    rows_by_name = {OURS: rows[1], BASELINE: rows[0]}
    published = [row for row in list_iterations("delays", "14B") if [*row.delays] == [6]]
    here = {
        name: {float(delay): 1e3 * each for delay, each in row["seconds"].items()}
        for name, row in rows_by_name.items()
    }
    theirs = {
        name: {each.delays[6]: each.times[way].mean for each in published}
        for name, way in ((OURS, "adapted"), (BASELINE, "zero-bubble"))
    }
    lines = [ChartLine(f"{name}, here", sorted(each.items())) for name, each in here.items()]
    lines += [
        ChartLine(f"{name}, published", sorted(each.items()), dots=True)
        for name, each in theirs.items()
    ]
    gained, gained_published = (each[BASELINE][60.0] / each[OURS][60.0] for each in (here, theirs))
    title = (
        f"14B model, 8 emulated stages: {gained:.1f}× as fast at 60 ms"
        f" (published, on GPUs: {gained_published:.1f}×)"
    )
    drawing = draw_chart(
        title, lines, x_name="delay of the last link, ms", y_name="ms per iteration"
    )
    path.write_bytes(drawing.to_png())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    pictures = importlib.util.find_spec("matplotlib") is not None

    stages = stages_here()
    step(
        f"1. A GPT over {stages} stages on {os.cpu_count()} cores; link 0 is late by "
        f"{DELAY_FORWARDS} forwards from iteration {SLOW_FROM} to {SLOW_TO}"
    )
    reports = {}
    for policy in (OURS, BASELINE):
        print(f"\n-- {policy}", flush=True)
        report = train(policy, stages, out)
        if report is None:
            return 1
        reports[policy] = report
    wrong = compare(reports[OURS], reports[BASELINE])
    if pictures:
        draw(reports[OURS], reports[BASELINE], out / "gpt.png")

    step("2. Eight emulated stages of a 14B model and a slow last link (nothing is computed)")
    if code := emulate(out):
        return code
    if pictures:
        draw_emulated(out / "emulated.json", out / "emulated.png")
        step("Pictures")
        for picture in sorted(out.rglob("*.png")):
            print(f"  {picture}")
    for line in wrong:
        print(f"demo: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
