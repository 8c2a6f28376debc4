"""`pipemorph diagnose` against the published figures of a straggler study, and its cost.

One command: ``python benchmarks/diagnose.py --data DIR``. DIR has a trace of the study as
``NAME.parquet`` and ``NAME.timeline.json.gz``, and its published results, ``NAME.expected.json``
(repository ByteDance-Seed/StragglerAnalysis). The trace is also repeated to 120,000 ops, as CSV and
as a Chrome trace, and with ``--gib`` to a Chrome trace of that size. Profiles of four ranks that
train with torch's 1F1B are also repeated to that size together.
"""

from __future__ import annotations

import csv
import gzip
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from goals import finish_benchmark, make_parser

OPS, RANKS, STEPS = 120_000, 4, 3
MOST_SECONDS, MOST_MIB, MOST_LARGE_MIB = 10.0, 150, 500
"""Goals for that many ops, and for a trace of any size."""


class Measured(NamedTuple):
    """A run of the command. ``seconds``: of a processor; ``mib``: its peak resident memory."""

    fields: dict[str, Any]
    seconds: float
    wall_seconds: float
    mib: float

    def __str__(self) -> str:
        return (
            f"{self.seconds:.1f} s of a processor ({self.wall_seconds:.1f} s), {self.mib:.0f} MiB"
        )


def diagnose(trace: Path) -> Measured:
    """Run the command on a trace, in a process of its own."""
    with tempfile.TemporaryFile() as out:
        began = time.perf_counter()
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", "pipemorph.cli", "diagnose", str(trace), "--output", "json"],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, out.fileno(), 1)],
        )
        _, status, usage = os.wait4(pid, 0)
        wall = time.perf_counter() - began
        if status:
            raise SystemExit(f"{trace}: pipemorph diagnose failed")
        out.seek(0)
        seconds = usage.ru_utime + usage.ru_stime
        return Measured(json.load(out), seconds, wall, usage.ru_maxrss / 1024)


def list_figures(found: dict[str, Any], expected: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Rows of a figure's name, its value found and published, and the allowed difference."""
    yield "S", found["slowdown"], expected["blocking_slowdown"], 0.02
    for name in ("optype", "stage", "dp_rank"):
        for key, value in expected[f"blocking_decompose_by_{name}"].items():
            yield f"S by {name}, {key}", found["slowdown_by"][name][key], value, 0.02
    yield "M_S", found["m_s"], expected["M_S"], 0.02
    yield "M_W", found["m_w"], expected["M_W"], 0.01


def check_figures(name: str, found: Measured, expected: dict[str, Any]) -> list[tuple[str, bool]]:
    """Print figures found and published. Returns the goals."""
    print(f"\n{name}: {found}\n")
    print("| figure | found | published |\n|---|---|---|")
    worst, holds = 0.0, True
    for figure, value, published, allowed in list_figures(found.fields, expected):
        print(f"| {figure} | {value:.6f} | {published:.6f} |")
        # Slowdowns are allowed a relative difference, shares an absolute one.
        apart = abs(value - published) / (published if figure.startswith("S") else 1.0)
        worst, holds = max(worst, apart), holds and apart <= allowed
    cause = found.fields["causes"][0]
    print(f"\nfirst cause: {cause['cause']}, {cause['where']}, {cause['share']:.1%} of a step")
    return [(f"{name}: published figures, at most {worst:.1e} apart", holds)]


class RepeatedTrace(NamedTuple):
    """Text of a Chrome trace whose events can be written again and again, as further steps.
    ``shifts``: by the text before a number in the events, what is added to it each time."""

    head: str
    events: str
    tail: str
    shifts: dict[str, int]

    def write(self, to: Path, *, size: float) -> None:
        """Write as many times as make ``size`` bytes, at least once."""
        pattern = re.compile(f"({'|'.join(map(re.escape, self.shifts))})(\\d+)")
        with to.open("w") as file:
            at, turn = file.write(self.head), 0
            while not turn or at < size:

                def shift(found: re.Match[str], turn: int = turn) -> str:
                    return f"{found[1]}{int(found[2]) + turn * self.shifts[found[1]]}"

                at += file.write(("," if turn else "") + pattern.sub(shift, self.events))
                turn += 1
            file.write(self.tail)


def read_study_trace(trace: Path) -> RepeatedTrace:
    """Read a Chrome trace of the study."""
    with gzip.open(trace) as file:
        events = json.load(file)
    ops = [event for event in events if event["ph"] == "X"]
    names = [event for event in events if event["ph"] != "X"]
    steps = 1 + max(event["args"]["step"] for event in ops)
    tail = f",{json.dumps(names)[1:]}"
    return RepeatedTrace("[", json.dumps(ops)[1:-1], tail, {'"step": ': steps})


def read_profile(trace: Path, steps: int) -> RepeatedTrace:
    """Read a trace of torch.profiler over some steps."""
    text = gzip.decompress(trace.read_bytes()).decode()
    begin, end = text.index("[", text.index('"traceEvents"')) + 1, text.rindex("]")
    seconds = 100
    shifts = {'"ts": ': seconds * 10**6, '"Sequence number": ': 10**6, "ProfilerStep#": steps}
    return RepeatedTrace(text[:begin], text[begin:end], text[end:], shifts)


def record_profiles(folder: Path) -> None:
    """Profile ranks that train with torch's 1F1B."""
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests/support")]
    from profiled_pipelines import PipelineRun, profile_into

    profile_into(folder, PipelineRun("1F1B", steps=STEPS), RANKS)


def measure_large(study: Path, gib: float, folder: Path) -> Iterator[tuple[str, Measured]]:
    """Diagnose ``gib`` GiB: a Chrome trace of the study, and profiles of four ranks."""
    size = gib * 2**30
    large = folder / "large.json"
    read_study_trace(study).write(large, size=size)
    yield "the study's Chrome form", diagnose(large)
    large.unlink()
    profiles = folder / "profiles"
    # In a process of its own: the peak memory of a program counts from that of its parent.
    child = multiprocessing.get_context("spawn").Process(target=record_profiles, args=(profiles,))
    child.start()
    child.join()
    for path in sorted(profiles.glob("*.json.gz")):
        read_profile(path, STEPS).write(path.with_suffix(""), size=size / RANKS)
        path.unlink()
    yield "traces of torch.profiler", diagnose(profiles)


def write_csv(chrome: Path, to: Path) -> None:
    """Write the ops of a Chrome trace of the study as CSV."""
    from pipemorph.diagnose.formats.registry import load_recording

    with to.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(
            [
                "step",
                "dp_rank",
                "stage",
                "rank",
                "optype",
                "start_ts",
                "duration",
                "seq_id",
                "mc",
                "gmc",
                "mb_id",
            ]
        )
        rows.writerows(op[:11] for op in load_recording([chrome]).table)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--gib", type=float, default=0, help="size of the largest trace")
    args = parser.parse_args()
    goals: list[tuple[str, bool]] = []
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ending = ".expected.json"
        names = [path.name.removesuffix(ending) for path in args.data.glob(f"*{ending}")]
        if not names:
            parser.error(f"{args.data} has no *.expected.json")
        for name in names:
            expected = json.loads((args.data / f"{name}.expected.json").read_text())
            for form in (f"{name}.parquet", f"{name}.timeline.json.gz"):
                if (args.data / form).exists():
                    found = diagnose(args.data / form)
                    figures[form] = found._asdict()
                    goals += check_figures(form, found, expected)
        source = args.data / f"{names[0]}.timeline.json.gz"
        if source.exists():
            trace = read_study_trace(source)
            ops = trace.events.count('"ph"')
            trace.write(folder / "long.json", size=OPS / ops * len(trace.events))
            write_csv(folder / "long.json", folder / "long.csv")
            for path in (folder / "long.json", folder / "long.csv"):
                found = diagnose(path)
                text = f"{OPS} ops, {path.name}: {found}"
                goals.append((text, found.seconds <= MOST_SECONDS and found.mib <= MOST_MIB))
                figures[path.name] = {"seconds": found.seconds, "mib": found.mib}
            for form, found in measure_large(source, args.gib, folder) if args.gib else ():
                text = f"{args.gib:g} GiB of {form}: {found}"
                goals.append((text, found.mib <= MOST_LARGE_MIB))
                figures[f"{args.gib:g} GiB of {form}"] = {
                    "seconds": found.seconds,
                    "mib": found.mib,
                }
    print()
    return 0 if finish_benchmark(goals, args.json, figures) else 1


if __name__ == "__main__":
    sys.exit(main())
