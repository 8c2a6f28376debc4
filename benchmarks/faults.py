"""Endurance test of the fault tolerance of a job: an hour of faults, one after the other.

    python benchmarks/faults.py [--seconds 3600 | --iterations N] [--faults 60] [--seed 0]
                                [--out FOLDER] [--json FILE] [--check]

Runs a small GPT, 2 stages × 2 replicas, under ``pipemorph run``: first undisturbed, for nine
tenths of the time, then for as many iterations with faults, one after the other. Each kind has an
equal share, in drawn order, at drawn iterations:

kill    a drawn rank gets SIGKILL at a drawn moment of the iteration
stop    a drawn rank gets SIGSTOP; spec.failurePolicy.hangSeconds is 3, or three times the longest
        undisturbed iteration if that is more
link    messages of a drawn replica's link take 10 to 60 ms more, for a fifth of the time until the
        next fault
port    a connection of a drawn replica's link is cut: the direct route, the engine's control
        connection or its data path. On this machine it is a lost connection, not an RDMA port
agent   the job's agent gets SIGKILL
files   the host may open no more files, for a fifth of the time until the next fault
disk    the file system of checkpoints is full, until the next fault. Only root can mount one
host    the host gets SIGKILL, 64 bytes of the newest checkpoint are perhaps changed, as drawn, and
        the same job is started again

Faults happen at iterations, so the job has recovered from each before the next one, and none
happens before the first finished iteration. A data path is cut only if it carries the link, after
the direct route was cut; a cut direct route returns when the ranks have started again.

Prints the number of faults of each kind and their cost, the goodput, whether all losses are there
and bitwise equal, and what grew during the run or remained after it: processes, memory, files,
shared memory. The last rank writes the losses after each step, because a killed host writes no
report. The goodput is the undisturbed median times the iterations, over the time of the run. Exits
1 if losses differ or are missing, a fault did not happen, an iteration was repeated without a
killed host, or something remained; with --check also if the goodput is too low.
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

from goals import finish_benchmark, make_parser
from recovery import REPLICAS, STAGES, WatchedJobRun, make_manifest, read_losses

from pipemorph.argument_types import duration_type
from pipemorph.exits import decode_progress, progress_file_name

KINDS = ("kill", "stop", "link", "port", "agent", "files", "disk", "host")
GOODPUT = 0.85
HANG_SECONDS, HANG_OVER_LONGEST = 3, 3.0
UNDISTURBED_SHARE = 0.9
"""Time of the undisturbed run over that of the one with faults."""
MOST_ITERATIONS = 1_000_000
"""Iterations of a run that ends by its time limit."""
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
"""Allowed growth of the host's memory with faults, beyond that without them. Detects a leak of
300 kB per fault after 120 faults."""
FILES, THREADS = 4, 2
"""Additional open files and threads at the end that are no leak: some are open for a moment."""
DEADLINE = 600.0
"""Seconds without an iteration after which a run is aborted. On a busy machine even the imports
take minutes."""
END_SECONDS = 10.0
"""Time for processes to end after the host."""
PR_SET_CHILD_SUBREAPER = 36


class DrawnFault(NamedTuple):
    """Drawn fault. ``who``: replica of the link, rank, or 1 if a checkpoint is damaged, too.
    ``length``: iterations."""

    kind: str
    iteration: int
    who: int
    length: int = 1
    delay_ms: float = 0.0
    severs: tuple[str, ...] = ()

    def to_spec_entries(self) -> Iterator[dict[str, Any]]:
        """Entries of ``spec.faults``."""
        effects = [{"delayMs": self.delay_ms}] if self.kind == "link" else []
        for at, effect in enumerate([*effects, *({"sever": what} for what in self.severs)]):
            # The second cut needs messages on the route that follows the first.
            first = self.iteration + 3 * at
            bounds = {"fromIteration": first, "toIteration": first + self.length}
            yield {"link": 0, "replica": self.who, **bounds, **effect}


def draw_faults(
    count: int, iterations: int, draw: random.Random, without: str = ""
) -> tuple[list[DrawnFault], int]:
    """Draw ``count`` faults, ordered by iteration, and return them with their distance in
    iterations. ``without``: kind that is impossible here."""
    kinds = list(([kind for kind in KINDS if kind != without] * count)[:count])
    draw.shuffle(kinds)
    apart = (iterations - SETTLED) // count
    if apart < LEAST_APART:
        raise SystemExit(
            f"{iterations} iterations are too few for {count} faults at least {LEAST_APART} apart: "
            "give more --seconds or fewer --faults"
        )
    faults = []
    cut: set[int] = set()
    """Replicas whose direct route is cut until the ranks start again."""
    for number, kind in enumerate(kinds):
        at = SETTLED + number * apart + draw.randrange(apart // 2)
        if kind in ("kill", "stop"):
            faults.append(DrawnFault(kind, at, draw.randrange(STAGES * REPLICAS)))
            cut.clear()
            continue
        if kind in ("agent", "files", "disk", "host"):
            if kind == "host":
                cut.clear()
            faults.append(DrawnFault(kind, at, draw.randrange(2), max(2, apart // 5)))
            continue
        replica = draw.randrange(REPLICAS)
        if kind == "link":
            delay = round(draw.uniform(*DELAY_MS), 1)
            faults.append(DrawnFault(kind, at, replica, max(2, apart // 5), delay_ms=delay))
            continue
        choices = [("control",), ("data",)]
        if replica not in cut:
            choices = [("control",), ("direct",), ("direct", "data")]
        severs = draw.choice(choices)
        if "direct" in severs:
            cut.add(replica)
        faults.append(DrawnFault(kind, at, replica, severs=severs))
    return faults, apart


def make_job(
    folder: Path, iterations: int, policy: dict[str, Any], every: int, **spec: Any
) -> dict[str, Any]:
    made = make_manifest(iterations, 0, folder, every)
    made["spec"] |= {"failurePolicy": policy, **spec}
    made["spec"]["checkpoint"]["keep"] = CHECKPOINTS
    trainer = made["spec"]["trainer"]
    del trainer["module"]
    trainer["command"] = ["python", str(Path(__file__).resolve()), "--rank", str(folder)]
    return made


def as_rank(folder: Path) -> None:
    """Program of a rank. The last rank writes the loss of each of its steps."""
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


def read_written_losses(folder: Path) -> dict[int, set[str]]:
    """Losses of each iteration, of all times that it ran, as written by the last rank."""
    found: dict[int, set[str]] = {}
    for line in (folder / "losses").read_text().splitlines():
        index, loss = line.split()
        found.setdefault(int(index), set()).add(loss)
    return found


class HostUsage(NamedTuple):
    """Resources of a run during training, without the ranks, but with their copies."""

    iteration: int
    resident: int
    files: int
    threads: int
    processes: int
    """Number of processes, including the ranks."""
    shared_files: int
    shared_bytes: int


@dataclass
class WatchedRun:
    """Run in ``folder`` and its resources. Its temporary files are in a separate folder."""

    folder: Path
    made: dict[str, Any]
    run: WatchedJobRun
    temporary: Path
    said: str = ""
    """Output of its killed hosts."""
    held: list[HostUsage] = field(default_factory=list)
    shared: set[Path] = field(default_factory=set)
    """Folders of the run in shared memory."""

    @staticmethod
    def start(folder: Path, made: dict[str, Any]) -> WatchedRun:
        # A short path, because sockets may be in the folder.
        temporary = Path(tempfile.mkdtemp(prefix="pipemorph-faults-"))
        watched = WatchedRun(
            folder, made, WatchedJobRun(folder / "0", made, {"TMPDIR": str(temporary)}), temporary
        )
        # Runs however this program ends. The host's own helper then ends its ranks.
        atexit.register(watched.stop)
        return watched

    def stop(self) -> None:
        self.run.host.kill()

    def restart_host(self, lives: int, damaged: random.Random | None) -> None:
        """Kill the host and start the same job. ``lives``: number of earlier starts; ``damaged``:
        draws the changes to the newest checkpoint, if there is an older one."""
        self.stop()
        self.run.host.wait(DEADLINE)
        self.said += self.run.read_output()
        self.held.clear()
        found = (self.folder / "checkpoints").glob("iteration-*/.metadata")
        saved = sorted((path.parent for path in found), key=lambda path: path.stat().st_mtime)
        if damaged is not None and len(saved) > 1:
            damage_checkpoint(saved[-1], damaged)
        again = {"TMPDIR": str(self.temporary)}
        self.run = WatchedJobRun(self.folder / str(lives), self.made, again)

    def count_done(self) -> int:
        """Largest number of iterations that any rank has finished."""
        counts = [0]
        for file in self.temporary.glob(f"pipemorph-run-*/{progress_file_name(0)[:-1]}*"):
            with contextlib.suppress(FileNotFoundError):
                if (found := decode_progress(file.read_bytes())) is not None:
                    counts.append(found[0])
        return max(counts)

    def wait_until_done(self, count: int) -> None:
        """Wait until a rank has finished ``count`` iterations."""
        end, before = time.monotonic() + DEADLINE, self.count_done()
        while (done := self.count_done()) < count:
            if self.run.host.poll() is not None:
                raise SystemExit(f"the run ended before iteration {count}:\n{self.read_tail()}")
            if done > before:
                end, before = time.monotonic() + DEADLINE, done
            if time.monotonic() > end:
                self.run.host.kill()
                raise SystemExit(
                    f"no iteration after {done} for {DEADLINE:g} s:\n{self.read_tail()}"
                )
            time.sleep(0.005)

    def read_output(self) -> str:
        return self.said + self.run.read_output()

    def read_tail(self) -> str:
        return self.run.read_output()[-4000:]

    def record_usage(self) -> None:
        """Record the resources of the run."""
        host = self.run.host.pid
        family = {host: "host"} | dict(find_descendants(host))
        resident = files = threads = 0
        for pid, name in family.items():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    _, found, rest = line.partition("/dev/shm/pipemorph")
                    if found:
                        self.shared.add(Path(found + rest.split("/")[0]))
                if name == "host" or (read_parent(pid) == host and not name.startswith("rank-")):
                    status = Path(f"/proc/{pid}/status").read_text()
                    values = dict(line.split(":", 1) for line in status.splitlines())
                    resident += int(values.get("VmRSS", "0 kB").split()[0]) << 10
                    threads += int(values["Threads"])
                    files += len(list(Path(f"/proc/{pid}/fd").iterdir()))
        paths = [path for root in self.shared for path in root.rglob("*") if path.is_file()]
        sizes = [size for path in paths if (size := _folder_size(path)) is not None]
        held = (resident, files, threads, len(family), len(sizes), sum(sizes))
        self.held.append(HostUsage(self.count_done(), *held))

    def limit_open_files(self, *, on: bool) -> None:
        """Forbid the host to open more files, or allow it again."""
        pid = self.run.host.pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        most = max(int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()) + 1
        soft = most if on else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))

    def find_leftovers(self) -> list[str]:
        """List remains after the end of the run. Removes its folder for temporary files."""
        end = time.monotonic() + END_SECONDS
        while (running := list(find_descendants(os.getpid()))) and time.monotonic() < end:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            time.sleep(0.05)
        found = [f"process {pid} ({name})" for pid, name in running]
        found += [str(path) for path in self.shared if path.exists()]
        # All programs of a user share torch's cache.
        found += [str(p) for p in self.temporary.iterdir() if "torchinductor" not in p.name]
        saved = sorted((self.folder / "checkpoints").glob("iteration-*"))
        if len(saved) > CHECKPOINTS * len(list(self.folder.glob("*/job.json"))):
            found += [str(path) for path in saved]
        if not found:
            shutil.rmtree(self.temporary)
        return found


def _folder_size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def read_parent(pid: int) -> int:
    """Parent of a process. Raises OSError if the process is gone."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def find_descendants(root: int) -> Iterator[tuple[int, str]]:
    """Processes below ``root``, with their names."""
    below: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            below.setdefault(read_parent(int(entry.name)), []).append(int(entry.name))
    todo = below.get(root, [])
    while todo:
        pid = todo.pop()
        todo += below.get(pid, [])
        with contextlib.suppress(OSError):
            yield pid, Path(f"/proc/{pid}/comm").read_text().strip()


@contextlib.contextmanager
def mount_small_disk(folder: Path) -> Iterator[None]:
    """Mount a file system for the checkpoints, if permitted."""
    folder.mkdir(parents=True)
    if os.geteuid() == 0:
        size = f"size={DISK_BYTES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], check=True)
    try:
        yield
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", "--lazy", folder], check=True)


def fill_disk(file: Path) -> None:
    """Write until its disk is full."""
    with file.open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(1 << 20))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def damage_checkpoint(checkpoint: Path, draw: random.Random) -> None:
    """Change bytes of a drawn file of a checkpoint."""
    file = draw.choice(sorted(checkpoint.glob("*.distcp")))
    content = bytearray(file.read_bytes())
    at = draw.randrange(max(1, len(content) - DAMAGED_BYTES))
    for index in range(at, min(at + DAMAGED_BYTES, len(content))):
        content[index] ^= 0xFF
    file.write_bytes(content)


def run_undisturbed(
    folder: Path, seconds: float, iterations: int | None, restarts: int
) -> tuple[WatchedRun, dict[str, Any]]:
    """Run the job without faults for ``iterations``, or else for ``seconds``."""
    limit = {"activeDeadlineSeconds": math.ceil(seconds)} if iterations is None else {}
    policy = {"maxRestarts": restarts}
    made = make_job(folder, iterations or MOST_ITERATIONS, policy, CHECKPOINT_EVERY, **limit)
    watched = WatchedRun.start(folder, made)
    watched.wait_until_done(SETTLED)
    host = watched.run.host
    while host.poll() is None:
        watched.record_usage()
        with contextlib.suppress(subprocess.TimeoutExpired):
            host.wait(max(1.0, seconds / 60))
    # At the last record the ranks may have ended.
    watched.held = [each for each in watched.held if each.iteration]
    report = watched.run.read_report()
    if report["end"] not in ("deadline", "completed"):
        raise SystemExit(f"the undisturbed run failed:\n{watched.read_tail()}")
    return watched, report


def run_disturbed(
    folder: Path,
    iterations: int,
    faults: list[DrawnFault],
    *,
    usual: float,
    hang_seconds: int,
    apart: int,
    draw: random.Random,
) -> tuple[WatchedRun, dict[str, Any], list[tuple[str, float]]]:
    """Run the job with faults; return it with the times, by wall clock, of signals to its ranks.
    ``usual``: seconds of an iteration; ``apart``: iterations from one fault to the next."""
    entries = [entry for fault in faults for entry in fault.to_spec_entries()]
    policy = {"maxRestarts": len(faults), "hangSeconds": hang_seconds}
    # No fault may happen again in iterations that are repeated after a killed host.
    every = max(1, min(CHECKPOINT_EVERY, apart // 8))
    watched = WatchedRun.start(folder, make_job(folder, iterations, policy, every, faults=entries))
    struck = []
    lives = 1
    filler = folder / "checkpoints" / "filler"
    for fault in faults:
        watched.wait_until_done(fault.iteration)
        watched.record_usage()
        if fault.kind == "agent":
            time.sleep(draw.random() * usual)
            for pid, _ in find_descendants(watched.run.host.pid):
                if b"pipemorph_trainer.agent" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        elif fault.kind == "files":
            watched.limit_open_files(on=True)
            watched.wait_until_done(fault.iteration + fault.length)
            watched.limit_open_files(on=False)
        elif fault.kind == "disk":
            fill_disk(filler)
            watched.wait_until_done(fault.iteration + fault.length)
            filler.unlink()
        elif fault.kind == "host":
            time.sleep(draw.random() * usual)
            watched.restart_host(lives, draw if fault.who else None)
            lives += 1
        if fault.kind not in ("kill", "stop"):
            continue
        time.sleep(draw.random() * usual)
        pid = watched.run.find_rank_process(fault.who)
        if pid is None:
            raise SystemExit(f"rank {fault.who} does not run:\n{watched.read_tail()}")
        struck.append((fault.kind, time.time()))
        os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
    watched.wait_until_done(iterations - LEAST_APART // 2)
    watched.record_usage()
    return watched, watched.run.wait_for_end(), struck


def count_cuts(folder: Path) -> Counter[str]:
    """Number of cut connections, by kind, from the logs of the ranks."""
    found: Counter[str] = Counter()
    for log in folder.glob("*/out/logs/rank-*.log"):
        for line in log.read_text(errors="replace").splitlines():
            _, said, rest = line.partition("fault trace cuts the ")
            if said:
                found[rest.split()[0]] += 1
    return found


def measure_period(folder: Path) -> float:
    """Mean seconds from the start of one iteration of a run to the next, including checkpoints."""
    traces = (folder / "0" / "out" / "trace" / "ops-rank0.jsonl").read_text().splitlines()
    starts = [json.loads(line)["origin"] for line in traces[:-1]]  # The last may be incomplete.
    return float(starts[-1] - starts[0]) / (len(starts) - 1)


def compare_growth(with_faults: WatchedRun, without: WatchedRun) -> list[tuple[str, bool]]:
    """Growth of the resources of the run with faults, with True where it is within the limit."""
    # The first faults load modules that only recoveries need.
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


def measure_runs(options: argparse.Namespace, folder: Path) -> tuple[list[tuple[str, bool]], Any]:
    """Measure both runs. Returns the goals, of which the goodput is the last one, and figures."""
    draw = random.Random(options.seed)
    seconds = options.seconds * UNDISTURBED_SHARE
    calm, usual = run_undisturbed(
        folder / "undisturbed", seconds, options.iterations, options.faults
    )
    loads = [os.getloadavg()[1]]
    remains = calm.find_leftovers()
    times = {each["index"]: each["seconds"] for each in usual["iterations"]}
    typical = median(times.values())
    undisturbed_period = measure_period(folder / "undisturbed")
    iterations = max(times) + 1
    without = "" if os.geteuid() == 0 else "disk"
    faults, apart = draw_faults(options.faults, iterations, draw, without)
    # The limit does not apply to the first iteration after a start.
    longest = max(seconds for index, seconds in times.items() if index)
    hang_seconds = max(HANG_SECONDS, math.ceil(HANG_OVER_LONGEST * longest))
    began, where = time.time(), folder / "faults"
    with mount_small_disk(where / "checkpoints"):
        watched, report, struck = run_disturbed(
            where, iterations, faults, usual=typical, hang_seconds=hang_seconds, apart=apart,
            draw=draw,
        )  # fmt: skip
        loads.append(os.getloadavg()[1])
        remains += watched.find_leftovers()

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
    for recovery in recoveries:  # Recoveries since the last start of the host.
        before = [each for each in struck if each[1] <= recovery["lost_at"] + 0.05]
        # A recovery without a strike of its own is listed below.
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
    print(f"\n{len(report['adaptations'])} changes of plan; cut: {dict(count_cuts(where))}")
    print(f"with the median between faults {quiet * iterations / wall:.3f}", end="; ")
    # Checkpoints and other work on the machine take time without faults, too.
    same_undisturbed = undisturbed_period * iterations / wall
    print(f"with the mean undisturbed time from one iteration to the next {same_undisturbed:.3f}")

    expected, same = read_written_losses(folder / "undisturbed"), read_written_losses(where)
    differ = [index for index, loss in same.items() if loss != expected.get(index)]
    of_usual = read_losses(usual)
    differ += [index for index, loss in read_losses(report).items() if loss != of_usual.get(index)]
    missing = sorted(set(range(iterations)) - set(same))
    first = min(found)
    unreported = sorted(set(range(first, iterations)) - set(found))
    wanted = Counter(what for fault in faults for what in fault.severs)
    went = re.findall(r"went on with iteration \d+ after [^;\n]*; (.*)", watched.read_output())
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
        (f"connections cut: {dict(wanted)}", count_cuts(where) == wanted),
        *compare_growth(watched, calm),
        (f"remains after the end: {', '.join(remains) or 'none'}", not remains),
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
    parser = make_parser(__doc__)
    parser.add_argument(
        "--seconds", type=duration_type, default=3600, help="of the run with faults"
    )
    parser.add_argument("--iterations", type=int, help="of each run, instead of --seconds")
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 if the goodput is too low")
    parser.add_argument("--rank", type=Path, metavar="FOLDER", help="run as a rank of that job")
    options = parser.parse_args()
    if options.rank is not None:
        return as_rank(options.rank)
    if options.faults < 1 or options.seconds < 1:
        parser.error(f"--faults {options.faults} --seconds {options.seconds:g}: expected 1 or more")
    folder = options.out or Path(tempfile.mkdtemp(prefix="pipemorph-faults-"))
    print(f"reports: {folder}", flush=True)
    # Makes orphans of a run children of this process, so that none is missed.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise SystemExit(f"prctl: {os.strerror(ctypes.get_errno())}")
    goals, figures = measure_runs(options, folder)
    finish_benchmark(goals, options.json, figures)
    raise SystemExit(0 if all(h for _, h in (goals if options.check else goals[:-1])) else 1)


if __name__ == "__main__":
    main()
