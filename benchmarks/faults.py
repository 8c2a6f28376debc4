"""Whether what a job promises about faults holds when they follow each other for an hour.

    python benchmarks/faults.py [--seconds 3600 | --iterations N] [--faults 60] [--seed 0]
                                [--out FOLDER] [--json FILE] [--check]

Runs a small GPT, 2 stages × 2 replicas, under ``pipemorph run``: first undisturbed, for nine
tenths of the time, then as many iterations again with faults, of which one follows the other. An
equal share each, in drawn order, at drawn iterations:

kill    a drawn rank gets SIGKILL at a drawn moment of the iteration
stop    the same with SIGSTOP; spec.failurePolicy.hangSeconds is 3, or three times the longest
        undisturbed iteration where that is more
link    messages of a drawn replica's link take 10 to 60 ms more, for a fifth of the time until the
        next fault
port    a connection of a drawn replica's link is cut: the direct route, the engine's control
        connection or its data path. On this machine it is a lost connection, not an RDMA port
agent   the job's agent gets SIGKILL
files   the host may open no more files, for a fifth of the time until the next fault
disk    the file system of checkpoints is full, until the next fault. Only root can mount one
host    the host gets SIGKILL, 64 bytes of the newest checkpoint are changed, or not, as is drawn,
        and the same job is started again

Faults come at iterations, so each has been recovered from before the next one, and none comes
before the ranks have finished an iteration. A data path is cut only where it carries the link,
after the direct route was cut; a cut direct route is back when the ranks have started again.

Prints how often each fault came and what it cost, the goodput, whether all losses are the same to
the bit and none is missing, and what of the run grew or was left: processes, memory, files, shared
memory. Losses are those that the last rank writes after each step, since a killed host leaves no
report. The goodput is the undisturbed median times the iterations, over the time of the run. Exits
1 if losses differ or are missing, a fault did not come, an iteration was repeated but for a killed
host, or something is left; with --check also if the goodput is too low.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import errno
import json
import math
import os
import random
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from goals import arguments, finish
from recovery import REPLICAS, STAGES, Run, losses, manifest

from pipemorph.arguments import duration
from pipemorph.exits import progress_file, progress_of

KINDS = ("kill", "stop", "link", "port", "agent", "files", "disk", "host")
GOODPUT = 0.85
HANG_SECONDS, HANG_OVER_LONGEST = 3, 3.0
UNDISTURBED_SHARE = 0.9
"""Time of the undisturbed run over that of the one with faults."""
MOST_ITERATIONS = 1_000_000
"""Of a run that is ended by its time."""
CHECKPOINT_EVERY, CHECKPOINTS = 20, 2
DISK_BYTES = 256 << 20
"""Size of the file system of checkpoints."""
SETTLED = 16
"""Iterations before the first fault."""
LEAST_APART = 10
"""Iterations from one fault to the next."""
DELAY_MS = (10.0, 60.0)
DAMAGED_BYTES = 64
RESIDENT_BYTES = 32 << 20
"""By how much more the memory of the host may grow with faults than without them. 300 kB a fault
would be seen in 120."""
FILES, THREADS = 4, 2
"""So many open files and threads more at the end are no leak: some are open for a moment."""
DEADLINE = 600.0
"""Seconds without an iteration after which a run is given up. Beside other work even the imports
take minutes."""
END_SECONDS = 10.0
"""Time for processes to end after the host has."""
PR_SET_CHILD_SUBREAPER = 36


class Fault(NamedTuple):
    """``who``: the replica whose link it is, the rank, or 1 if a checkpoint is damaged, too.
    ``length``: iterations."""

    kind: str
    iteration: int
    who: int
    length: int = 1
    delay_ms: float = 0.0
    severs: tuple[str, ...] = ()

    def entries(self) -> Iterator[dict[str, Any]]:
        """Of ``spec.faults``."""
        effects = [{"delayMs": self.delay_ms}] if self.kind == "link" else []
        for at, effect in enumerate([*effects, *({"sever": what} for what in self.severs)]):
            # The second cut needs messages on the route that follows the first.
            first = self.iteration + 3 * at
            bounds = {"fromIteration": first, "toIteration": first + self.length}
            yield {"link": 0, "replica": self.who, **bounds, **effect}


def drawn(
    count: int, iterations: int, draw: random.Random, without: str = ""
) -> tuple[list[Fault], int]:
    """``count`` faults, in the order of their iterations, and how far they are apart. ``without``:
    a kind that cannot be had."""
    kinds = list(([kind for kind in KINDS if kind != without] * count)[:count])
    draw.shuffle(kinds)
    apart = (iterations - SETTLED) // count
    if apart < LEAST_APART:
        raise SystemExit(
            f"{iterations} iterations are too few for {count} faults, which are at least "
            f"{LEAST_APART} apart: give more --seconds or fewer --faults"
        )
    faults = []
    cut: set[int] = set()
    """Replicas whose direct route is gone until the ranks start again."""
    for number, kind in enumerate(kinds):
        at = SETTLED + number * apart + draw.randrange(apart // 2)
        if kind in ("kill", "stop"):
            faults.append(Fault(kind, at, draw.randrange(STAGES * REPLICAS)))
            cut.clear()
            continue
        if kind in ("agent", "files", "disk", "host"):
            if kind == "host":
                cut.clear()
            faults.append(Fault(kind, at, draw.randrange(2), max(2, apart // 5)))
            continue
        replica = draw.randrange(REPLICAS)
        if kind == "link":
            delay = round(draw.uniform(*DELAY_MS), 1)
            faults.append(Fault(kind, at, replica, max(2, apart // 5), delay_ms=delay))
            continue
        choices = [("control",), ("data",)]
        if replica not in cut:
            choices = [("control",), ("direct",), ("direct", "data")]
        severs = draw.choice(choices)
        if "direct" in severs:
            cut.add(replica)
        faults.append(Fault(kind, at, replica, severs=severs))
    return faults, apart


def job(
    folder: Path, iterations: int, policy: dict[str, Any], every: int, **spec: Any
) -> dict[str, Any]:
    made = manifest(iterations, 0, folder, every)
    made["spec"] |= {"failurePolicy": policy, **spec}
    made["spec"]["checkpoint"]["keep"] = CHECKPOINTS
    trainer = made["spec"]["trainer"]
    del trainer["module"]
    trainer["command"] = ["python", str(Path(__file__).resolve()), "--rank", str(folder)]
    return made


def as_rank(folder: Path) -> None:
    """A rank. The last one writes the loss of each of its steps."""
    from pipemorph_trainer import Pipeline  # Only ranks need torch.

    step = Pipeline.step

    def step_and_write(pipe: Pipeline, *args: Any, **kwargs: Any) -> Any:
        index = pipe.iteration
        loss = step(pipe, *args, **kwargs)
        if int(os.environ["RANK"]) == STAGES * REPLICAS - 1:
            with (folder / "losses").open("a") as file:
                file.write(f"{index} {float(loss).hex()}\n")
        return loss

    Pipeline.step = step_and_write  # type: ignore[method-assign]
    sys.argv = sys.argv[:1]
    runpy.run_module("pipemorph_trainer.examples.gpt", run_name="__main__")


def written_losses(folder: Path) -> dict[int, set[str]]:
    """The losses of each iteration, of all times that it ran, as the last rank wrote them."""
    found: dict[int, set[str]] = {}
    for line in (folder / "losses").read_text().splitlines():
        index, loss = line.split()
        found.setdefault(int(index), set()).add(loss)
    return found


class Held(NamedTuple):
    """What a run holds while it trains. Without the ranks, but with their copies."""

    iteration: int
    resident: int
    files: int
    threads: int
    processes: int
    """With the ranks."""
    shared_files: int
    shared_bytes: int


@dataclass
class Watched:
    """A run in ``folder``, and what it holds. Its temporary files are in a folder of its own."""

    folder: Path
    made: dict[str, Any]
    run: Run
    temporary: Path
    said: str = ""
    """By its hosts that were killed."""
    held: list[Held] = field(default_factory=list)
    shared: set[Path] = field(default_factory=set)
    """Its folders in shared memory."""

    @staticmethod
    def start(folder: Path, made: dict[str, Any]) -> Watched:
        # Short, as sockets may be in it.
        temporary = Path(tempfile.mkdtemp(prefix="pipemorph-faults-"))
        watched = Watched(
            folder, made, Run(folder / "0", made, {"TMPDIR": str(temporary)}), temporary
        )
        # Whatever ends this program. The host's own helper then ends its ranks.
        atexit.register(watched.end)
        return watched

    def end(self) -> None:
        self.run.host.kill()

    def start_again(self, lives: int, damaged: random.Random | None) -> None:
        """Kill the host and start the same job. ``lives``: how often it was started before;
        ``damaged``: draws what is changed in the newest checkpoint, if there is an older one."""
        self.end()
        self.run.host.wait(DEADLINE)
        self.said += self.run.said()
        self.held.clear()
        found = (self.folder / "checkpoints").glob("iteration-*/.metadata")
        saved = sorted((path.parent for path in found), key=lambda path: path.stat().st_mtime)
        if damaged is not None and len(saved) > 1:
            damage(saved[-1], damaged)
        again = {"TMPDIR": str(self.temporary)}
        self.run = Run(self.folder / str(lives), self.made, again)

    def done(self) -> int:
        """Iterations that any rank has finished."""
        counts = [0]
        for file in self.temporary.glob(f"pipemorph-run-*/{progress_file(0)[:-1]}*"):
            with contextlib.suppress(FileNotFoundError):
                if (found := progress_of(file.read_bytes())) is not None:
                    counts.append(found[0])
        return max(counts)

    def await_done(self, count: int) -> None:
        """Wait until a rank has finished that many."""
        end, before = time.monotonic() + DEADLINE, self.done()
        while (done := self.done()) < count:
            if self.run.host.poll() is not None:
                raise SystemExit(f"the run ended before iteration {count}:\n{self.tail()}")
            if done > before:
                end, before = time.monotonic() + DEADLINE, done
            if time.monotonic() > end:
                self.run.host.kill()
                raise SystemExit(f"no iteration after {done} for {DEADLINE:g} s:\n{self.tail()}")
            time.sleep(0.005)

    def all_said(self) -> str:
        return self.said + self.run.said()

    def tail(self) -> str:
        return self.run.said()[-4000:]

    def look(self) -> None:
        """Take down what it holds."""
        host = self.run.host.pid
        family = {host: "host"} | dict(descendants(host))
        resident = files = threads = 0
        for pid, name in family.items():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    _, found, rest = line.partition("/dev/shm/pipemorph")
                    if found:
                        self.shared.add(Path(found + rest.split("/")[0]))
                if name == "host" or (parent(pid) == host and not name.startswith("rank-")):
                    status = Path(f"/proc/{pid}/status").read_text()
                    values = dict(line.split(":", 1) for line in status.splitlines())
                    resident += int(values.get("VmRSS", "0 kB").split()[0]) << 10
                    threads += int(values["Threads"])
                    files += len(list(Path(f"/proc/{pid}/fd").iterdir()))
        kept = [path for root in self.shared for path in root.rglob("*") if path.is_file()]
        sizes = [size for path in kept if (size := _size(path)) is not None]
        held = (resident, files, threads, len(family), len(sizes), sum(sizes))
        self.held.append(Held(self.done(), *held))

    def open_no_more_files(self, *, on: bool) -> None:
        """Set whether the host may open no file beside those that it has open."""
        pid = self.run.host.pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        most = max(int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()) + 1
        soft = most if on else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))

    def left(self) -> list[str]:
        """What is left after its end. Removes its folder for temporary files."""
        end = time.monotonic() + END_SECONDS
        while (running := list(descendants(os.getpid()))) and time.monotonic() < end:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            time.sleep(0.05)
        left = [f"process {pid} ({name})" for pid, name in running]
        left += [str(path) for path in self.shared if path.exists()]
        # torch's cache is one for all programs of a user.
        left += [str(p) for p in self.temporary.iterdir() if "torchinductor" not in p.name]
        saved = sorted((self.folder / "checkpoints").glob("iteration-*"))
        if len(saved) > CHECKPOINTS * len(list(self.folder.glob("*/job.json"))):
            left += [str(path) for path in saved]
        if not left:
            shutil.rmtree(self.temporary)
        return left


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def parent(pid: int) -> int:
    """Raises OSError if it is gone."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def descendants(root: int) -> Iterator[tuple[int, str]]:
    """Processes below ``root``, with their names."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            below.setdefault(parent(int(entry.name)), []).append(int(entry.name))
    todo = below.get(root, [])
    while todo:
        pid = todo.pop()
        todo += below.get(pid, [])
        with contextlib.suppress(OSError):
            yield pid, Path(f"/proc/{pid}/comm").read_text().strip()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a file system for the checkpoints, if that is allowed."""
    folder.mkdir(parents=True)
    if os.geteuid() == 0:
        size = f"size={DISK_BYTES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], check=True)
    try:
        yield
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", "--lazy", folder], check=True)


def fill(file: Path) -> None:
    """Write until its disk is full."""
    with file.open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(1 << 20))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def damage(checkpoint: Path, draw: random.Random) -> None:
    """Change bytes of a drawn file of a checkpoint."""
    file = draw.choice(sorted(checkpoint.glob("*.distcp")))
    content = bytearray(file.read_bytes())
    at = draw.randrange(max(1, len(content) - DAMAGED_BYTES))
    for index in range(at, min(at + DAMAGED_BYTES, len(content))):
        content[index] ^= 0xFF
    file.write_bytes(content)


def undisturbed(
    folder: Path, seconds: float, iterations: int | None, restarts: int
) -> tuple[Watched, dict[str, Any]]:
    """The job without faults, ended after so many iterations, or else seconds."""
    limit = {"activeDeadlineSeconds": math.ceil(seconds)} if iterations is None else {}
    policy = {"maxRestarts": restarts}
    made = job(folder, iterations or MOST_ITERATIONS, policy, CHECKPOINT_EVERY, **limit)
    watched = Watched.start(folder, made)
    watched.await_done(SETTLED)
    host = watched.run.host
    while host.poll() is None:
        watched.look()
        with contextlib.suppress(subprocess.TimeoutExpired):
            host.wait(max(1.0, seconds / 60))
    # The last look may have found the ranks ended.
    watched.held = [each for each in watched.held if each.iteration]
    report = watched.run.report()
    if report["end"] not in ("deadline", "completed"):
        raise SystemExit(f"the undisturbed run failed:\n{watched.tail()}")
    return watched, report


def disturbed(
    folder: Path,
    iterations: int,
    faults: list[Fault],
    *,
    usual: float,
    hang_seconds: int,
    apart: int,
    draw: random.Random,
) -> tuple[Watched, dict[str, Any], list[tuple[str, float]]]:
    """The job with faults, and when its ranks were struck: wall clock. ``usual``: seconds of an
    iteration; ``apart``: iterations from one fault to the next."""
    entries = [entry for fault in faults for entry in fault.entries()]
    policy = {"maxRestarts": len(faults), "hangSeconds": hang_seconds}
    # So that no fault comes again in iterations that are repeated after a killed host.
    every = max(1, min(CHECKPOINT_EVERY, apart // 8))
    watched = Watched.start(folder, job(folder, iterations, policy, every, faults=entries))
    struck = []
    lives = 1
    filler = folder / "checkpoints" / "filler"
    for fault in faults:
        watched.await_done(fault.iteration)
        watched.look()
        if fault.kind == "agent":
            time.sleep(draw.random() * usual)
            for pid, _ in descendants(watched.run.host.pid):
                if b"pipemorph_trainer.agent" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        elif fault.kind == "files":
            watched.open_no_more_files(on=True)
            watched.await_done(fault.iteration + fault.length)
            watched.open_no_more_files(on=False)
        elif fault.kind == "disk":
            fill(filler)
            watched.await_done(fault.iteration + fault.length)
            filler.unlink()
        elif fault.kind == "host":
            time.sleep(draw.random() * usual)
            watched.start_again(lives, draw if fault.who else None)
            lives += 1
        if fault.kind not in ("kill", "stop"):
            continue
        time.sleep(draw.random() * usual)
        pid = watched.run.rank(fault.who)
        if pid is None:
            raise SystemExit(f"rank {fault.who} does not run:\n{watched.tail()}")
        struck.append((fault.kind, time.time()))
        os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
    watched.await_done(iterations - LEAST_APART // 2)
    watched.look()
    return watched, watched.run.finish(), struck


def cuts(folder: Path) -> Counter[str]:
    """Connections that ranks say they have cut."""
    found: Counter[str] = Counter()
    for log in folder.glob("*/out/logs/rank-*.log"):
        for line in log.read_text(errors="replace").splitlines():
            _, said, rest = line.partition("fault trace cuts the ")
            if said:
                found[rest.split()[0]] += 1
    return found


def mean_period(folder: Path) -> float:
    """Seconds from the begin of one iteration of a run to the next one's, with checkpoints."""
    traces = (folder / "0" / "out" / "trace" / "ops-rank0.jsonl").read_text().splitlines()
    begins = [json.loads(line)["origin"] for line in traces[:-1]]  # The last may be cut.
    return float(begins[-1] - begins[0]) / (len(begins) - 1)


def growth(with_faults: Watched, without: Watched) -> list[tuple[str, bool]]:
    """What the run with faults held more at its end than at its beginning, and whether it may."""
    # The first faults load what only recoveries need.
    first, last = with_faults.held[min(4, len(with_faults.held) // 2)], with_faults.held[-1]
    begin, end = without.held[len(without.held) // 8], without.held[-1]
    per_iteration = (end.resident - begin.resident) / max(1, end.iteration - begin.iteration)
    by_design = max(0.0, per_iteration) * (last.iteration - first.iteration)
    grown = last.resident - first.resident - by_design
    least, most = (each(h.shared_bytes for h in with_faults.held) for each in (min, max))
    return [
        (
            f"memory of the host and its helpers: {first.resident >> 20} MiB after "
            f"{first.iteration} iterations, {last.resident >> 20} after {last.iteration}; of that "
            f"{by_design / 2**20:.1f} as without faults ({per_iteration:.0f} B an iteration), "
            f"{grown / 2**20:.1f} more",
            grown <= RESIDENT_BYTES,
        ),
        (f"their open files: {first.files}, {last.files}", last.files <= first.files + FILES),
        (
            f"their threads: {first.threads}, {last.threads}",
            last.threads <= first.threads + THREADS,
        ),
        (
            f"processes of the run: {first.processes}, {last.processes}",
            last.processes <= first.processes,
        ),
        (
            f"files in shared memory: {first.shared_files}, {last.shared_files}; least and most "
            f"bytes {least}, {most}",
            0 < last.shared_files <= first.shared_files + FILES,
        ),
    ]


def measure(options: argparse.Namespace, folder: Path) -> tuple[list[tuple[str, bool]], Any]:
    """Both runs, and a line for each thing that has to hold, the goodput last; and figures."""
    draw = random.Random(options.seed)
    seconds = options.seconds * UNDISTURBED_SHARE
    calm, usual = undisturbed(folder / "undisturbed", seconds, options.iterations, options.faults)
    loads = [os.getloadavg()[1]]
    left = calm.left()
    times = {each["index"]: each["seconds"] for each in usual["iterations"]}
    typical = median(times.values())
    calm_seconds = mean_period(folder / "undisturbed")
    iterations = max(times) + 1
    without = "" if os.geteuid() == 0 else "disk"
    faults, apart = drawn(options.faults, iterations, draw, without)
    # The limit does not hold for the first one of a start.
    longest = max(seconds for index, seconds in times.items() if index)
    hang_seconds = max(HANG_SECONDS, math.ceil(HANG_OVER_LONGEST * longest))
    began, where = time.time(), folder / "faults"
    with small_disk(where / "checkpoints"):
        watched, report, struck = disturbed(
            where, iterations, faults, usual=typical, hang_seconds=hang_seconds, apart=apart,
            draw=draw,
        )  # fmt: skip
        loads.append(os.getloadavg()[1])
        left += watched.left()

    counts, recoveries = Counter(fault.kind for fault in faults), report["recoveries"]
    wall = report["ended_at"] - began
    goodput = typical * iterations / wall
    print(f"{iterations} iterations of {STAGES} stages x {REPLICAS} replicas, {wall:.0f} s")
    print(f"faults: {', '.join(f'{counts[kind]} {kind}' for kind in KINDS)}", end="")
    print(", as only root can mount a full disk" if without else "", end="")
    print(f"; hangSeconds {hang_seconds}, longest undisturbed iteration {longest:.2f} s")
    print(f"load average of five minutes after each run: {loads[0]:.1f}, {loads[1]:.1f}")
    took: dict[str, list[float]] = {"kill": [], "stop": []}
    counted: list[tuple[str, float]] = []
    for recovery in recoveries:  # Since the host was started the last time.
        before = [each for each in struck if each[1] <= recovery["lost_at"] + 0.05]
        # One that follows no strike of its own is shown below.
        if before and before[-1] not in counted and recovery["seconds"] is not None:
            counted.append(before[-1])
            kind, at = before[-1]
            took[kind].append(recovery["lost_at"] + recovery["seconds"] - at)
    for kind, seen in took.items():
        if seen:
            print(
                f"{kind}: to the end of the next iteration, median {median(seen):.2f} s, "
                f"worst {max(seen):.2f} s"
            )
    found = {each["index"]: each["seconds"] for each in report["iterations"]}
    slow = {
        index
        for fault in faults
        if fault.kind == "link"
        for index in range(fault.iteration, fault.iteration + fault.length)
    }
    struck_at = {each["went_on_with"] for each in recoveries}
    quiet = median(t for index, t in found.items() if index not in slow | struck_at)
    print(f"iterations, median: undisturbed {typical:.3f} s, between faults {quiet:.3f} s", end="")
    if delayed := [t for index, t in found.items() if index in slow]:
        print(f", with a slow link {median(delayed):.3f} s", end="")
    print(f"\n{len(report['adaptations'])} changes of plan; cut: {dict(cuts(where))}")
    print(f"with the median between faults {quiet * iterations / wall:.3f}", end="; ")
    # Its checkpoints, and what else was on the machine, took time without faults, too.
    same_undisturbed = calm_seconds * iterations / wall
    print(f"with the mean undisturbed time from one iteration to the next {same_undisturbed:.3f}")

    expected, same = written_losses(folder / "undisturbed"), written_losses(where)
    differ = [index for index, loss in same.items() if loss != expected.get(index)]
    of_usual = losses(usual)
    differ += [index for index, loss in losses(report).items() if loss != of_usual.get(index)]
    missing = sorted(set(range(iterations)) - set(same))
    first = min(found)
    unreported = sorted(set(range(first, iterations)) - set(found))
    wanted = Counter(what for fault in faults for what in fault.severs)
    went = re.findall(r"went on with iteration \d+ after [^;\n]*; (.*)", watched.all_said())
    repeated = [line for line in went if not line.startswith("no iteration was repeated")]
    hard = [
        (f"losses of {len(same)} iterations, differing: {differ}", not differ),
        (
            f"missing: {missing}; of the {iterations - first} reported since the last start:"
            f" {unreported}",
            not missing and not unreported,
        ),
        (
            f"{len(went)} recoveries of {len(struck)} struck ranks, in {len(report['attempts'])}"
            " attempt",
            len(went) == len(struck) and len(report["attempts"]) == 1,
        ),
        (f"recoveries that repeated iterations: {len(repeated)} {repeated[:3]}", not repeated),
        (f"connections cut: {dict(wanted)}", cuts(where) == wanted),
        *growth(watched, calm),
        (f"left after the end: {', '.join(left) or 'nothing'}", not left),
    ]
    figures = {
        "wall": wall,
        "iterations": iterations,
        "goodput": goodput,
        "seconds": took,
        "load": loads,
        "held": [each._asdict() for each in watched.held],
        "held_undisturbed": [each._asdict() for each in calm.held],
        "faults": [each._asdict() for each in faults],
    }
    soft = f"goodput, undisturbed median x iterations / time {goodput:.3f}, ≥ {GOODPUT:g}"
    return [*hard, (soft, goodput >= GOODPUT)], figures


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=duration, default=3600, help="of the run with faults")
    parser.add_argument("--iterations", type=int, help="so many instead")
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 if the goodput is too low")
    parser.add_argument("--rank", type=Path, metavar="FOLDER", help="be a rank of the job there")
    options = parser.parse_args()
    if options.rank is not None:
        return as_rank(options.rank)
    if options.faults < 1 or options.seconds < 1:
        parser.error(f"--faults {options.faults} --seconds {options.seconds:g}: expected 1 or more")
    folder = options.out or Path(tempfile.mkdtemp(prefix="pipemorph-faults-"))
    print(f"reports: {folder}", flush=True)
    # Orphans of a run become children of this process, so that none is missed.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise SystemExit(f"prctl: {os.strerror(ctypes.get_errno())}")
    goals, figures = measure(options, folder)
    finish(goals, options.json, figures)
    raise SystemExit(0 if all(h for _, h in (goals if options.check else goals[:-1])) else 1)


if __name__ == "__main__":
    main()
