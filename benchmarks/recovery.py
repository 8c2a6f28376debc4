"""How long a job takes to go on after a rank was killed, and whether it goes on as if nothing was.

    python benchmarks/recovery.py [--kills 50] [--stops 10] [--terms 5] [--pods 10] [--seed 0]
                                  [--out FOLDER] [--json FILE] [--check]

Runs a small GPT, 2 stages × 2 replicas, under ``pipemorph run``: once undisturbed, and once with
``kill -9`` of a drawn rank at a drawn moment of an iteration, again when the job has gone on.
Prints the seconds from each kill to the end of the next iteration (as the host hears of it, a
fraction of a second later), how many finished iterations were run again, and whether all losses are
the same to the bit.

The same with SIGSTOP and ``failurePolicy.hangSeconds``: how long until the rank is found, too.

Then the run as a whole gets SIGTERM at drawn moments, with 30 s of grace: how long until it has
saved and ended, and whether the next run goes on with the next iteration.

Then kills with 4 stages of one replica, each rank in a pod of its own, as far as its memory
goes: with the rank its folder is lost, so that its state comes from the next pod's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from goals import arguments, finish

STAGES, REPLICAS = 2, 2
POD_STAGES, EVERY = 4, 4
"""Of the second job: stages, and iterations from one copy of its state to the next."""
MEDIAN, WORST = 5.0, 10.0
"""Goals, seconds from a kill, or from when a stopped rank is found, to the end of the next
iteration."""
HANG_SECONDS, HANG_OVER_LONGEST, NOTICED_SECONDS = 3, 3.0, 2.0
"""The deadline of an iteration, at least so many times the longest undisturbed one; and how much
later a stopped rank may be found: others end the iteration in which it is stopped."""
GRACE_SECONDS = 30
DEADLINE = 120.0
"""Seconds without an iteration after which the run is given up."""


def manifest(
    iterations: int,
    restarts: int,
    folder: Path,
    every: int,
    *,
    pods: bool = False,
    policy: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """``pods``: of the second job, whose ranks have folders of their own. ``policy``: more of its
    failure policy."""
    stages, replicas = (POD_STAGES, 1) if pods else (STAGES, REPLICAS)
    program: dict[str, Any] = {"module": "pipemorph_trainer.examples.gpt"}
    if pods:
        program = {"command": ["python", str(Path(__file__).resolve()), "--rank", str(folder)]}
    checkpoint = {"checkpoint": {"directory": str(folder / "checkpoints"), "every": every}}
    return {
        "apiVersion": "pipemorph.io/v1alpha1",
        "kind": "PipeMorphJob",
        "metadata": {"name": "recovery"},
        "spec": {
            "parallelism": {"stages": stages, "replicas": replicas, "layers": 4},
            "schedule": {"microbatches": 8},
            "trainer": {
                **program,
                "iterations": iterations,
                "seed": 1,
                "args": {"width": 64, "heads": 4, "sequence": 64, "microbatch_size": 2},
            },
            **({} if pods else checkpoint),
            "failurePolicy": {"maxRestarts": restarts, **(policy or {})},
            "template": {
                "spec": {
                    "terminationGracePeriodSeconds": GRACE_SECONDS,
                    "containers": [{"name": "trainer"}],
                }
            },
            "recovery": {"snapshotIterations": EVERY if pods else 1, "neighbour": pods},
        },
    }


class Run:
    """One ``pipemorph run`` in ``folder``. ``env``: of the host, beside this process's own."""

    def __init__(
        self, folder: Path, job: dict[str, Any], env: Mapping[str, str] | None = None
    ) -> None:
        folder.mkdir(parents=True)
        (folder / "job.json").write_text(json.dumps(job))
        self.out = folder / "out"
        command = [sys.executable, "-m", "pipemorph.cli", "run", str(folder / "job.json")]
        self._log = (folder / "log").open("w+b")
        self.host = subprocess.Popen(
            [*command, "--out", str(self.out)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=os.environ | (env or {}),
        )

    def said(self) -> str:
        return Path(self._log.name).read_text()

    def finish(self) -> dict[str, Any]:
        if self.host.wait(3600) != 0:
            raise SystemExit(f"the run failed:\n{self.said()[-4000:]}")
        return self.report()

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.out / "report.json").read_text())
        return report

    def rank(self, number: int) -> int | None:
        """The process id of a rank that is running."""
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                name = (entry / "comm").read_text().strip()
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == self.host.pid and name == f"rank-{number}":
                return int(entry.name)
        return None

    def iterations(self) -> int:
        """Lines of rank 0's trace: one per iteration that it has finished in any generation."""
        trace = self.out / "trace" / "ops-rank0.jsonl"
        return trace.read_bytes().count(b"\n") if trace.exists() else 0

    def await_iterations(self, count: int) -> bool:
        """Wait until rank 0 has finished that many; False if the run has ended before."""
        end = time.monotonic() + DEADLINE
        while self.iterations() < count:
            if self.host.poll() is not None:
                return False
            if time.monotonic() > end:
                self.host.kill()
                raise SystemExit(f"no iteration for {DEADLINE:g} s:\n{self.said()[-4000:]}")
            time.sleep(0.01)
        return True


def as_rank(folder: Path) -> None:
    """A rank of the second job: what it keeps is in a folder of its own, as in a pod."""
    kept = os.environ.get("PIPEMORPH_KEPT_DIR")
    if kept is not None:
        rank, word = os.environ["RANK"], f"resumed.generation-{os.environ['PIPEMORPH_GENERATION']}"
        own = Path(kept) / f"pod-{rank}"
        own.mkdir(mode=0o700, exist_ok=True)
        if rank == "0" and not (Path(kept) / word).is_symlink():
            # Where the host reads it.
            (Path(kept) / word).symlink_to(own / word)
        (folder / f"kept-{rank}").write_text(str(own))
        os.environ["PIPEMORPH_KEPT_DIR"] = str(own)
    sys.argv = sys.argv[:1]
    runpy.run_module("pipemorph_trainer.examples.gpt", run_name="__main__")


def lose(folder: Path, rank: int) -> Path:
    """Take a rank's folder away while it runs, so that no later one finds it."""
    own = Path((folder / f"kept-{rank}").read_text())
    return own.rename(own.with_name(f"lost-{time.time_ns()}"))


def killed_run(
    run: Run,
    kills: int,
    apart: int,
    draw: random.Random,
    *,
    ranks: int,
    pods: Path | None = None,
    by: signal.Signals = signal.SIGKILL,
) -> list[float]:
    """Send drawn ranks a signal at drawn moments; the times. ``pods``: where the folders of ranks
    are written down, which are lost with them."""
    times: list[float] = []
    # The first iterations are slower: they test the split of the backward.
    while len(times) < kills and run.await_iterations(run.iterations() + apart):
        began = time.monotonic()
        if not run.await_iterations(run.iterations() + 1):
            break
        iteration = time.monotonic() - began
        time.sleep(draw.random() * min(iteration, 5.0))
        rank = draw.randrange(ranks)
        pid = run.rank(rank)
        if pid is None:
            continue
        gone = lose(pods, rank) if pods is not None else None
        times.append(time.time())
        os.kill(pid, by)
        if gone is not None:
            shutil.rmtree(gone)
    return times


def losses(report: dict[str, Any]) -> dict[int, float]:
    return {each["index"]: each["loss"] for each in report["iterations"]}


def measure(
    name: str, options: argparse.Namespace, folder: Path, kills: int
) -> tuple[list[tuple[str, bool]], dict[str, Any]]:
    """Run a job undisturbed and with kills, and print what came of it. Returns goals, with whether
    they hold, and figures. ``name``: ``ranks`` or ``pods`` are killed, or ``stops``."""
    pods, stops = name == "pods", name == "stops"
    apart = options.iterations_apart + (EVERY if pods else 0)
    iterations = (kills + 1) * (apart + 4)
    # A checkpoint on a busy disk takes longer than an iteration may.
    every = 10 * iterations if stops else options.checkpoint_every

    def job(what: str, restarts: int, policy: Mapping[str, int]) -> Run:
        where = folder / f"{name}-{what}"
        made = manifest(iterations, restarts, where, every, pods=pods, policy=policy)
        return Run(where, made)

    undisturbed = job("undisturbed", 0, {}).finish()
    longest = max(each["seconds"] for each in undisturbed["iterations"][1:])
    hang = max(HANG_SECONDS, math.ceil(HANG_OVER_LONGEST * longest))
    run = job("killed", kills, {"hangSeconds": hang} if stops else {})
    ranks = POD_STAGES if pods else STAGES * REPLICAS
    where = folder / f"{name}-killed" if pods else None
    draw = random.Random(options.seed)
    by = signal.SIGSTOP if stops else signal.SIGKILL
    times = killed_run(run, kills, apart, draw, ranks=ranks, pods=where, by=by)
    report = run.finish()

    recoveries = [each for each in report["recoveries"] if each["seconds"] is not None]
    caused: dict[float, float] = {}
    """By when a failure was noticed, when its signal was sent."""
    for at in times:
        later = [each["lost_at"] for each in report["recoveries"] if at <= each["lost_at"] + 0.05]
        if later:
            caused[later[0]] = at
    by_signal = [each for each in recoveries if each["lost_at"] in caused]
    noticed = [each["lost_at"] - caused[each["lost_at"]] for each in by_signal]
    seconds = [
        each["seconds"] + (0.0 if stops else late)
        for each, late in zip(by_signal, noticed, strict=True)
    ]
    if other := len(report["recoveries"]) - len(caused):
        print(f"{name}: {other} failures that no signal caused; is the machine busy?")
    repeated = [each["repeated"] for each in recoveries]
    found, expected = losses(report), losses(undisturbed)
    same = all(found[index] == expected[index] for index in found)
    shape = f"{STAGES} stages x {REPLICAS} replicas"
    if pods:
        shape = f"{POD_STAGES} stages, each in a pod, whose memory is lost with it"
    print(f"{name}: {len(times)} times {by.name} for a drawn rank of {shape}")
    print(
        f"recoveries that finished an iteration: {len(recoveries)} of {len(report['recoveries'])}"
    )
    print(f"from: {', '.join(sorted({str(each['state']) for each in recoveries}))}")
    print(f"rungs: {', '.join(sorted({each['rung'] for each in recoveries}))}")
    if unreported := iterations - len(found):
        print(f"finished by ranks that ended before they could report: {unreported} iterations")
    with_kills, without = (each["status"]["goodput"] for each in (report, undisturbed))
    print(f"goodput {with_kills:.1%}; undisturbed {without:.1%}")
    most = EVERY if pods else 0
    since = "from when it is found" if stops else "from the kill"
    goals = [
        (
            f"{name}: {since} to the next finished iteration, median ≤ {MEDIAN:g} s:"
            f" {median(seconds):.2f}",
            median(seconds) <= MEDIAN,
        ),
        (f"{name}: the same, worst ≤ {WORST:g} s: {max(seconds):.2f}", max(seconds) <= WORST),
        (
            f"{name}: finished iterations repeated, most ≤ {most}: {max(repeated)}",
            max(repeated) <= most,
        ),
        (f"{name}: losses of {len(found)} iterations, equal to the bit", same),
    ]
    if stops:
        late = max(noticed) - hang
        goals.append(
            (
                f"{name}: found after {median(noticed):.2f} s, median, of hangSeconds"
                f" {hang}, and at most {NOTICED_SECONDS:g} s later: {late:.2f}",
                late <= NOTICED_SECONDS,
            )
        )
    if pods:
        held = sum(each["state"] == "neighbour" for each in recoveries)
        goals.append((f"{name}: {held} of {len(recoveries)} from the next pod", held > 0))
    figures = {"seconds": seconds, "noticed": noticed, "repeated": repeated, "same_losses": same}
    return goals, figures


def asked_to_end(
    options: argparse.Namespace, folder: Path, terms: int
) -> tuple[list[tuple[str, bool]], dict[str, Any]]:
    """Ask a run to end at drawn moments, and begin the next one where it has saved. Goals and
    figures as of :func:`measure`."""
    draw = random.Random(options.seed)
    iterations = (terms + 1) * (options.iterations_apart + 4)

    def job(what: str) -> dict[str, Any]:
        # Nothing but what they save as they are asked to end: no other checkpoint is due.
        return manifest(iterations, 0, folder / what, 10 * iterations)

    undisturbed = Run(folder / "terms-undisturbed", job("terms-undisturbed")).finish()
    seconds, lost, ran = [], [], 0
    found: dict[int, float] = {}
    for number in range(terms + 1):
        run = Run(folder / f"terms-{number}", job("terms"))
        last = number == terms
        if not last:
            run.await_iterations(options.iterations_apart)
            time.sleep(draw.random() * 0.2)
            began = time.monotonic()
            run.host.terminate()
            run.host.wait(DEADLINE)
            seconds.append(time.monotonic() - began)
        report = run.finish() if last else run.report()
        each = losses(report)
        if not each or (not last and "saved a checkpoint" not in run.said()):
            raise SystemExit(f"the run has not saved:\n{run.said()[-4000:]}")
        ran += len(each)
        if number:
            # Negative where one ran again.
            lost.append(min(each) - max(found) - 1)
        found |= each
    same = found == losses(undisturbed)
    print(f"terms: {terms} times SIGTERM for a run of {STAGES} stages x {REPLICAS} replicas")
    return [
        (
            f"terms: saved and ended within {GRACE_SECONDS} s, worst: {max(seconds):.2f}, median:"
            f" {median(seconds):.2f}",
            max(seconds) <= GRACE_SECONDS,
        ),
        (
            f"terms: iterations lost or run again: {sum(map(abs, lost))} of {ran}",
            not any(lost) and ran == iterations,
        ),
        (f"terms: losses of {len(found)} iterations, equal to the bit", same),
    ], {"seconds": seconds, "lost": lost, "same_losses": same}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kills", type=int, default=50, help="of ranks; 0: no such run")
    parser.add_argument("--stops", type=int, default=10, help="the same by SIGSTOP")
    parser.add_argument("--terms", type=int, default=5, help="of runs, by SIGTERM; 0: none")
    parser.add_argument("--pods", type=int, default=10, help="that are lost; 0: no such run")
    parser.add_argument("--iterations-apart", type=int, default=4)
    parser.add_argument("--checkpoint-every", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 if a goal does not hold")
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp(prefix="pipemorph-recovery-"))
    print(f"reports: {folder}")
    goals: list[tuple[str, bool]] = []
    figures = {}
    for name, kills in (("ranks", options.kills), ("stops", options.stops), ("pods", options.pods)):
        if kills:
            found, figures[name] = measure(name, options, folder, kills)
            goals += found
    if options.terms:
        found, figures["terms"] = asked_to_end(options, folder, options.terms)
        goals += found
    kept = finish(goals, options.json, figures)
    same = all(each["same_losses"] for each in figures.values())
    raise SystemExit(0 if same and (kept or not options.check) else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        as_rank(Path(sys.argv[2]))
    else:
        main()
