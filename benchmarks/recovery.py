"""Time for a job to recover from a killed rank, and a check that its losses do not change.

    python benchmarks/recovery.py [--kills 50] [--stops 10] [--terms 5] [--pods 10] [--seed 0]
                                  [--out FOLDER] [--json FILE] [--check]

Runs a small GPT, 2 stages × 2 replicas, under ``pipemorph run``: once undisturbed, and once with
``kill -9`` of a drawn rank at a drawn moment of an iteration, repeated after each recovery. Prints
the seconds from each kill to the end of the next iteration (as received by the host, a fraction of
a second later), the number of repeated iterations, and a check that all losses are bitwise equal.

A second series uses SIGSTOP and ``failurePolicy.hangSeconds``, and also prints the time until the
rank is found.

Then the run as a whole gets SIGTERM at drawn moments, with 30 s of grace: prints the time until it
has saved and ended, and checks that the next run continues with the next iteration.

Then ranks are killed in a job with 4 stages and one replica, in which each rank has its own memory,
as in a pod: its folder is lost with it, so that its state comes from the next pod.
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

from goals import finish_benchmark, make_parser

STAGES, REPLICAS = 2, 2
POD_STAGES, EVERY = 4, 4
"""Stages of the second job, and iterations from one copy of its state to the next."""
MEDIAN, WORST = 5.0, 10.0
"""Goals in seconds from a kill, or from the detection of a stopped rank, to the end of the next
iteration."""
HANG_SECONDS, HANG_OVER_LONGEST, NOTICED_SECONDS = 3, 3.0, 2.0
"""Deadline of an iteration; its least multiple of the longest undisturbed one; and allowed delay of
detection beyond it: other ranks first end the iteration in which a rank is stopped."""
GRACE_SECONDS = 30
DEADLINE = 120.0
"""Seconds without an iteration after which the run is aborted."""


def make_manifest(
    iterations: int,
    restarts: int,
    folder: Path,
    every: int,
    *,
    pods: bool = False,
    policy: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Manifest of a job. ``pods``: the second job, whose ranks have separate folders. ``policy``:
    further fields of its failure policy."""
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


class WatchedJobRun:
    """Run by ``pipemorph run`` in ``folder``. ``env``: additional environment of the host."""

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

    def read_output(self) -> str:
        return Path(self._log.name).read_text()

    def wait_for_end(self) -> dict[str, Any]:
        if self.host.wait(3600) != 0:
            raise SystemExit(f"the run failed:\n{self.read_output()[-4000:]}")
        return self.read_report()

    def read_report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.out / "report.json").read_text())
        return report

    def find_rank_process(self, number: int) -> int | None:
        """Process id of a running rank; None if it does not run."""
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                name = (entry / "comm").read_text().strip()
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == self.host.pid and name == f"rank-{number}":
                return int(entry.name)
        return None

    def count_iterations(self) -> int:
        """Number of iterations that rank 0 has finished in any generation, by its trace."""
        trace = self.out / "trace" / "ops-rank0.jsonl"
        return trace.read_bytes().count(b"\n") if trace.exists() else 0

    def wait_for_iterations(self, count: int) -> bool:
        """Wait until rank 0 has finished ``count`` iterations; False if the run ends before."""
        end = time.monotonic() + DEADLINE
        while self.count_iterations() < count:
            if self.host.poll() is not None:
                return False
            if time.monotonic() > end:
                self.host.kill()
                raise SystemExit(f"no iteration for {DEADLINE:g} s:\n{self.read_output()[-4000:]}")
            time.sleep(0.01)
        return True


def as_rank(folder: Path) -> None:
    """Program of a rank of the second job, with its state in a separate folder, as in a pod."""
    shared = os.environ.get("PIPEMORPH_KEPT_DIR")
    if shared is not None:
        rank, word = os.environ["RANK"], f"resumed.generation-{os.environ['PIPEMORPH_GENERATION']}"
        own = Path(shared) / f"pod-{rank}"
        own.mkdir(mode=0o700, exist_ok=True)
        if rank == "0" and not (Path(shared) / word).is_symlink():
            # The host reads the file in the shared folder.
            (Path(shared) / word).symlink_to(own / word)
        (folder / f"kept-{rank}").write_text(str(own))
        os.environ["PIPEMORPH_KEPT_DIR"] = str(own)
    sys.argv = sys.argv[:1]
    runpy.run_module("pipemorph_trainer.examples.gpt", run_name="__main__")


def remove_folder(folder: Path, rank: int) -> Path:
    """Move the folder of a running rank away, so that its successor does not find it."""
    own = Path((folder / f"kept-{rank}").read_text())
    return own.rename(own.with_name(f"lost-{time.time_ns()}"))


def killed_run(
    run: WatchedJobRun,
    kills: int,
    apart: int,
    draw: random.Random,
    *,
    ranks: int,
    pods: Path | None = None,
    by: signal.Signals = signal.SIGKILL,
) -> list[float]:
    """Send drawn ranks a signal at drawn moments; return the times. ``pods``: folder with the paths
    of the ranks' folders, which are lost with the ranks."""
    times: list[float] = []
    # The first iterations are slower: they test the split of the backward.
    while len(times) < kills and run.wait_for_iterations(run.count_iterations() + apart):
        began = time.monotonic()
        if not run.wait_for_iterations(run.count_iterations() + 1):
            break
        iteration = time.monotonic() - began
        time.sleep(draw.random() * min(iteration, 5.0))
        rank = draw.randrange(ranks)
        pid = run.find_rank_process(rank)
        if pid is None:
            continue
        gone = remove_folder(pods, rank) if pods is not None else None
        times.append(time.time())
        os.kill(pid, by)
        if gone is not None:
            shutil.rmtree(gone)
    return times


def read_losses(report: dict[str, Any]) -> dict[int, float]:
    return {each["index"]: each["loss"] for each in report["iterations"]}


def measure_kills(
    name: str, options: argparse.Namespace, folder: Path, kills: int
) -> tuple[list[tuple[str, bool]], dict[str, Any]]:
    """Run a job undisturbed and with kills, and print the results. Returns goals, with True if they
    hold, and figures. ``name``: ``ranks`` or ``pods`` are killed; ``stops``: ranks are stopped."""
    pods, stops = name == "pods", name == "stops"
    apart = options.iterations_apart + (EVERY if pods else 0)
    iterations = (kills + 1) * (apart + 4)
    # A checkpoint on a busy disk may take longer than the deadline of an iteration.
    every = 10 * iterations if stops else options.checkpoint_every

    def make_job(what: str, restarts: int, policy: Mapping[str, int]) -> WatchedJobRun:
        where = folder / f"{name}-{what}"
        made = make_manifest(iterations, restarts, where, every, pods=pods, policy=policy)
        return WatchedJobRun(where, made)

    undisturbed = make_job("undisturbed", 0, {}).wait_for_end()
    longest = max(each["seconds"] for each in undisturbed["iterations"][1:])
    hang = max(HANG_SECONDS, math.ceil(HANG_OVER_LONGEST * longest))
    run = make_job("killed", kills, {"hangSeconds": hang} if stops else {})
    ranks = POD_STAGES if pods else STAGES * REPLICAS
    where = folder / f"{name}-killed" if pods else None
    draw = random.Random(options.seed)
    by = signal.SIGSTOP if stops else signal.SIGKILL
    times = killed_run(run, kills, apart, draw, ranks=ranks, pods=where, by=by)
    report = run.wait_for_end()

    recoveries = [each for each in report["recoveries"] if each["seconds"] is not None]
    caused: dict[float, float] = {}
    """Time of the signal, by the time at which the failure was noticed."""
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
    found, expected = read_losses(report), read_losses(undisturbed)
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


def measure_requested_ends(
    options: argparse.Namespace, folder: Path, terms: int
) -> tuple[list[tuple[str, bool]], dict[str, Any]]:
    """End a run by SIGTERM at drawn moments, and start the next one from its checkpoint. Returns
    goals and figures as :func:`measure_kills` does."""
    draw = random.Random(options.seed)
    iterations = (terms + 1) * (options.iterations_apart + 4)

    def make_job(what: str) -> dict[str, Any]:
        # The only checkpoints are those saved on SIGTERM: no other one is due.
        return make_manifest(iterations, 0, folder / what, 10 * iterations)

    undisturbed = WatchedJobRun(
        folder / "terms-undisturbed", make_job("terms-undisturbed")
    ).wait_for_end()
    seconds, lost, ran = [], [], 0
    found: dict[int, float] = {}
    for number in range(terms + 1):
        run = WatchedJobRun(folder / f"terms-{number}", make_job("terms"))
        last = number == terms
        if not last:
            run.wait_for_iterations(options.iterations_apart)
            time.sleep(draw.random() * 0.2)
            began = time.monotonic()
            run.host.terminate()
            run.host.wait(DEADLINE)
            seconds.append(time.monotonic() - began)
        report = run.wait_for_end() if last else run.read_report()
        each = read_losses(report)
        if not each or (not last and "saved a checkpoint" not in run.read_output()):
            raise SystemExit(f"the run has not saved:\n{run.read_output()[-4000:]}")
        ran += len(each)
        if number:
            # Negative if an iteration ran again.
            lost.append(min(each) - max(found) - 1)
        found |= each
    same = found == read_losses(undisturbed)
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
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=50, help="killed ranks; 0: no such run")
    parser.add_argument("--stops", type=int, default=10, help="stopped ranks; 0: no such run")
    parser.add_argument("--terms", type=int, default=5, help="runs ended by SIGTERM; 0: none")
    parser.add_argument("--pods", type=int, default=10, help="lost pods; 0: no such run")
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
            found, figures[name] = measure_kills(name, options, folder, kills)
            goals += found
    if options.terms:
        found, figures["terms"] = measure_requested_ends(options, folder, options.terms)
        goals += found
    all_hold = finish_benchmark(goals, options.json, figures)
    same = all(each["same_losses"] for each in figures.values())
    raise SystemExit(0 if same and (all_hold or not options.check) else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        as_rank(Path(sys.argv[2]))
    else:
        main()
