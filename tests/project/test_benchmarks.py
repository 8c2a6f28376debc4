"""The benchmarks of planning run, and `make bench` fails where a goal does not hold."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from pipemorph.api.mesh import MeshShape
from pipemorph.manifest import parse_job

pytestmark = pytest.mark.full
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(script: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def verdicts(done: subprocess.CompletedProcess[str]) -> dict[str, bool]:
    """What is promised, and whether it holds; the exit status must say the same."""
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    found = {
        line[3:].strip(): line.startswith("ok ")
        for line in done.stdout.splitlines()
        if line.startswith(("ok ", "NO "))
    }
    assert found, done.stdout[-3000:]
    assert done.returncode == (0 if all(found.values()) else 1), done.stdout[-3000:]
    return found


# --- a change of plan to all ranks ----------------------------------------------------------


def test_every_played_rank_gets_its_part() -> None:
    sizes = ("--stages", 8, "--replicas", 4, "--microbatches", 12, "--check")
    done = run(BENCHMARKS / "plan_handout.py", *sizes)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "32 ranks, connected" in done.stdout
    assert "at most 20 MB: holds" in done.stdout


def test_an_agent_whose_host_refuses_it_fails_the_benchmark() -> None:
    bench = load("plan_handout")

    class Ended(bench.Scripted):  # type: ignore[misc, name-defined]
        """A job whose next attempt is in progress."""

        asked = 0

        @property
        def attempt(self) -> int:
            self.asked += 1
            return 7

    async def run() -> None:
        job = Ended()
        async with asyncio.timeout(60), bench.hosted(job, MeshShape(2)):
            while job.asked < 4:
                await asyncio.sleep(0.01)

    with pytest.raises(RuntimeError, match=r"answered the agent with errors .* 403"):
        asyncio.run(run())


# --- what reports cost ------------------------------------------------------------------------


def test_reports_of_a_job_cost_its_host_next_to_nothing() -> None:
    done = run(BENCHMARKS / "observer_cost.py", "--only", "4x1")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| 4 × 1 |")]
    assert [row.split("|")[2].strip() for row in rows] == ["healthy", "onset", "fault"]
    assert float(rows[0].split("|")[3]) == 1.0, "reports a second"


# --- planning as a service ---------------------------------------------------------------------


def test_a_monopoly_of_the_planners_is_held_to_the_same_asks_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = load("planning_service")
    found = {
        "alone, pool": {2: [0.01] * 9 + [0.1], 64: [1.0]},
        "flood, pool": {2: [0.01] * 9 + [0.39], 64: [4.1]},
        "alone again, pool": {2: [0.01] * 9 + [0.3], 64: [3.0]},
    }
    assert bench.ratios(found) == {2: pytest.approx((0.2, 1.95)), 64: pytest.approx((2.0, 2.05))}

    async def measured(_: float) -> Any:
        return found

    monkeypatch.setattr(bench, "measure", measured)
    for arguments, status in ((["--check"], 1), ([], 0)):
        monkeypatch.setattr(sys, "argv", ["planning_service.py", *arguments])
        assert bench.main() == status
        lines = capsys.readouterr().out.splitlines()
        assert [line.rpartition(": ")[2] for line in lines[1:]] == [
            "1.95 × holds",
            "2.05 × DOES NOT HOLD",
        ]


# --- all of them ---------------------------------------------------------------------------


def stub(folder: Path, name: str, text: str, status: int = 0) -> None:
    (folder / f"{name}.py").write_text(
        "import pathlib, sys\n"
        f"pathlib.Path({str(folder)!r}, {name!r} + '.called').write_text(' '.join(sys.argv[1:]))\n"
        f"print({text!r})\n"
        f"sys.exit({status})\n"
    )


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    """``all.py`` beside benchmarks of one line, all of whose goals hold."""
    shutil.copy(BENCHMARKS / "all.py", tmp_path / "all.py")
    for name in load("all").NAMES:
        stub(tmp_path, name, f"a table of {name}\nok  what {name} promises")
    return tmp_path


def called(bench: Path) -> dict[str, str]:
    return {file.stem: file.read_text() for file in bench.glob("*.called")}


def test_bench_is_content_where_every_goal_holds(bench: Path) -> None:
    done = run(bench / "all.py", "--out", bench / "out")
    assert done.returncode == 0 and done.stdout.endswith("\nevery goal holds\n"), done
    arguments = called(bench)
    assert set(arguments) == set(load("all").NAMES)
    for name, given in arguments.items():
        assert given.split()[:2] == ["--json", str(bench / "out" / f"{name}.json")]
    checked = {name for name, given in arguments.items() if "--check" in given}
    with_goals = {
        name for name in arguments if '"--check"' in (BENCHMARKS / f"{name}.py").read_text()
    }
    assert checked == with_goals and "engine" in checked
    assert (bench / "out" / "split.md").read_text() == "a table of split\nok  what split promises\n"


def test_bench_fails_at_its_end_and_names_what_did_not_hold(bench: Path) -> None:
    lost = "tcp ≥ 0.95 × iperf3, 4 streams: 0.91 DOES NOT HOLD"
    slow = "NO  S=8, N=32: 31.0 ms median (at most 10)"
    stub(bench, "planner", f"ok  no cap\n{slow}", 1)
    stub(bench, "engine", f"a table\n{lost}", 1)
    stub(bench, "engine_idle", "1 × tcp idle: 4.0% DOES NOT HOLD")  # and exits 0
    stub(bench, "gpt_losses", "no verdict", 1)
    done = run(bench / "all.py", "--out", bench / "out")
    assert done.returncode == 1
    assert len(called(bench)) == len(load("all").NAMES), "all of them run, whatever the first says"
    end = done.stdout[done.stdout.index("\ngoals that do not hold") :].splitlines()
    assert end == [
        "",
        "goals that do not hold: planner, engine, engine_idle",
        f"  planner: {slow}",
        f"  engine: {lost}",
        "  engine_idle: 1 × tcp idle: 4.0% DOES NOT HOLD",
        "",
        "failed: gpt_losses (exit 1)",
    ]
    for alone in ("engine_idle", "gpt_losses"):
        assert run(bench / "all.py", "--out", bench / "out", alone).returncode == 1, alone


@pytest.mark.parametrize("name", ["engine", "engine_idle"])
def test_those_that_hold_their_goals_only_when_asked_to_take_the_flag(name: str) -> None:
    assert "--check" in run(BENCHMARKS / f"{name}.py", "--help").stdout


# --- one by one ----------------------------------------------------------------------------


def rows(text: str, head: str) -> list[list[str]]:
    """The cells of the table whose first line begins with ``head``."""
    lines = text[text.index(head) :].splitlines()[2:]
    table = []
    for line in lines:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def test_planner_prints_both_tables_for_all_planners_and_its_verdicts(tmp_path: Path) -> None:
    report = tmp_path / "planner.json"
    done = run(BENCHMARKS / "planner.py", "--quick", "--json", report)
    said = verdicts(done)
    for what in ("no cap: ", "with a cap: ", "S=8, N=32: "):
        assert any(text.startswith(what) for text in said), said
    planners = ["pipemorph", "paper", "zero-bubble", "1f1b"]
    gaps = rows(done.stdout, "| problems |")
    assert [cells[1] for cells in gaps] == planners * 8
    times = rows(done.stdout, "| S | N |")
    shapes = [(shape, cap) for shape in ("uniform", "uneven", "multi-link")
              for cap in ("none", "2S", "S+2")]  # fmt: skip
    assert [tuple(cells[:4]) for cells in times] == [
        (s, n, *kind) for s, n in (("8", "32"), ("16", "64")) for kind in shapes
    ]
    for cells in times:
        assert len(cells) == 10 and all(re.fullmatch(r"\d+\.\d ms", cell) for cell in cells[4:9])
        assert all(float(cell.removesuffix(" ms")) > 0 for cell in cells[4:9])
    assert "Time grows with (S·N)^" in done.stdout
    harder = rows(done.stdout, "| S | N | |")
    assert len(harder) == 6 and harder[0][:3] == ["8", "32", "nothing else"]
    found: dict[str, Any] = json.loads(report.read_text())
    assert len(found["times"]) == len(times) and set(found["times"][0]["ms"]) == set(planners)
    assert report.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_traces_prints_its_table_and_its_verdicts(tmp_path: Path) -> None:
    report = tmp_path / "traces.json"
    done = run(
        BENCHMARKS / "traces.py", "--simulated", 1, "--no-emulation", "--json", report
    )  # fmt: skip
    assert len(verdicts(done)) == 3
    traces = load("traces")
    table = rows(done.stdout, "| 8 stages, 24 microbatches |")
    assert [cells[0] for cells in table] == [variant.name for variant in traces.VARIANTS]
    for cells in table:
        assert re.fullmatch(r"\d+ ms \(\d+–\d+\)", cells[1])
        assert re.fullmatch(r"\d\.\d\d×", cells[2]) and cells[3] == "not run"
    assert len(json.loads(report.read_text())) == len(table)
    assert report.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_jobs_that_traces_runs_are_manifests() -> None:
    """Running them takes minutes; that they are taken shows at once."""
    traces = load("traces")
    for variant in traces.VARIANTS:
        text = yaml.safe_dump(traces.manifest(variant, traces.Trace.random(0)))
        job = parse_job(text)
        assert job.spec.adaptation.enabled is variant.adaptive
        assert len(job.spec.faults) == traces.DRAWS


def test_traces_reads_what_an_emulated_run_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = load("traces")
    smallest = {"STAGES": 2, "SLOW_LINK": 0, "MICROBATCHES": 4, "ITERATIONS": 3, "SETTLE": 1}
    for name, value in smallest.items():
        monkeypatch.setattr(traces, name, value)
    row = traces.Row(traces.BOTH.name)
    traces.emulate(traces.BOTH, traces.Trace.random(0), tmp_path, row)
    assert len(row.emulated_iterations) == 3
    # F, B and W of four microbatches at least; a delay of 1 ms or more each way was held up.
    assert row.emulated > 4 * sum(traces.TIMES_MS.values())
    assert 0 < row.bubble < 1


# --- against torch's schedules ---------------------------------------------------------------


def test_peers_that_the_installed_torch_lacks_are_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = load("torch_peer")
    newest = bench.Offered("2.15.0", True, ("stages", "defer_pp_recv"))
    assert newest.peers == list(bench.PEERS)
    oldest = bench.Offered("2.11.0", False, ("stages",))
    assert oldest.peers == ["1F1B", "zero bubble"]
    (_, _, _, last) = bench.PEERS
    assert oldest.lacks("1F1B, per edge") == ["a communicator per edge"]
    assert oldest.lacks(last) == ["a communicator per edge", "defer_pp_recv"]
