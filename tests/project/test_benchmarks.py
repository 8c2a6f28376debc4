"""The benchmarks of planning run, and `make bench` fails where a goal does not hold."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import replay
import torch_peer
from all import CHECKED, NAMES

pytestmark = pytest.mark.full
BENCHMARKS = Path(replay.__file__).parent


def run(script: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def verdicts(done: subprocess.CompletedProcess[str]) -> dict[str, bool]:
    """Promises of a benchmark, each with true if it holds; the exit status must say the same."""
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    found = {
        line[3:].strip(): line.startswith("ok ")
        for line in done.stdout.splitlines()
        if line.startswith(("ok ", "NO "))
    }
    assert found, done.stdout[-3000:]
    assert done.returncode == (0 if all(found.values()) else 1), done.stdout[-3000:]
    return found


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
    """Folder of ``all.py`` and of benchmarks of one line, all of whose goals hold."""
    shutil.copy(BENCHMARKS / "all.py", tmp_path / "all.py")
    for name in NAMES:
        stub(tmp_path, name, f"a table of {name}\nok  what {name} promises")
    return tmp_path


def called(bench: Path) -> dict[str, str]:
    return {file.stem: file.read_text() for file in bench.glob("*.called")}


def test_bench_is_content_where_every_goal_holds(bench: Path) -> None:
    done = run(bench / "all.py", "--out", bench / "out")
    assert done.returncode == 0 and done.stdout.endswith("\nevery goal holds\n"), done
    arguments = called(bench)
    assert set(arguments) == set(NAMES)
    for name, given in arguments.items():
        assert given.split()[:2] == ["--json", str(bench / "out" / f"{name}.json")]
    checked = {name for name, given in arguments.items() if "--check" in given}
    with_goals = {
        name for name in arguments if '"--check"' in (BENCHMARKS / f"{name}.py").read_text()
    }
    assert checked == with_goals and "engine" in checked
    assert (bench / "out" / "scale.md").read_text() == "a table of scale\nok  what scale promises\n"


def test_bench_fails_at_its_end_and_names_broken_goals(bench: Path) -> None:
    lost = "NO  tcp ≥ 1.1 × gloo: 0.91"
    slow = "NO  S=8, N=32: 31.0 ms median (at most 10)"
    stub(bench, "planner", f"ok  no cap\n{slow}", 1)
    stub(bench, "engine", f"a table\n{lost}", 1)
    stub(bench, "scale", "NO  agent ≤ 0.15 processors: 0.2")  # and exits 0
    stub(bench, "detector", "no verdict", 1)
    done = run(bench / "all.py", "--out", bench / "out")
    assert done.returncode == 1
    assert len(called(bench)) == len(NAMES), "all of them run, whatever the first says"
    end = done.stdout[done.stdout.index("\ngoals that do not hold") :].splitlines()
    assert end == [
        "",
        "goals that do not hold: planner, engine, scale",
        f"  planner: {slow}",
        f"  engine: {lost}",
        "  scale: NO  agent ≤ 0.15 processors: 0.2",
        "",
        "failed: detector (exit 1)",
    ]
    for alone in ("scale", "detector"):
        assert run(bench / "all.py", "--out", bench / "out", alone).returncode == 1, alone


@pytest.mark.parametrize("name", [*NAMES, "faults"])
def test_a_benchmark_starts_and_explains_its_options(name: str) -> None:
    done = run(BENCHMARKS / f"{name}.py", "--help")
    assert done.returncode == 0, done.stderr[-3000:]
    assert name not in CHECKED or "--check" in done.stdout


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


def test_random_traces_of_varying_delays_are_replayed_with_each_dispatch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = "runs of 40 ms, pauses as long"
    monkeypatch.setattr(replay, "RANDOM", {kind: replay.RANDOM[kind]})
    monkeypatch.setattr(replay, "ITERATIONS", 6)
    monkeypatch.setattr(replay, "LEAST_GAIN", 10.0)
    missed, found = replay.run_random(1)
    assert [(row["case"], row["cap"]) for row in found] == [(kind, None), (kind, 16)]
    assert all(len(row["seconds"].split(", ")) == 2 for row in found)
    said = capsys.readouterr().out
    for dispatch in ("static", "auto"):
        assert f"random, dispatch {dispatch}: " in said
        assert any(line.startswith(f"NO dispatch {dispatch}: ") for line in missed)


# --- against torch's schedules ---------------------------------------------------------------


def test_peers_that_the_installed_torch_lacks_are_skipped_by_name() -> None:
    newest = torch_peer.InstalledTorch("2.15.0", True, ("stages", "defer_pp_recv"))
    assert newest.comparable_peers == list(torch_peer.PEERS)
    oldest = torch_peer.InstalledTorch("2.11.0", False, ("stages",))
    assert oldest.comparable_peers == ["1F1B", "zero bubble"]
    (_, _, _, last) = torch_peer.PEERS
    assert oldest.explain_lack("1F1B, per edge") == ["a communicator per edge"]
    assert oldest.explain_lack(last) == ["a communicator per edge", "defer_pp_recv"]
