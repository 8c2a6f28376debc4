"""The gate itself: which tier and part a test has, what a second run excuses and what it never
does, and what the table says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
from gate import AlwaysRed, always_red, budget, final, parts, plan, results, same_bits, tiers
from gate.schedule import Schedule
from gate.verdict import MOST_UNSTABLE, PartResult, SecondRun, Verdict

TESTS = Path(__file__).resolve().parents[1]
CONFTEST = f"""
import sys
from hypothesis import settings
sys.path.insert(0, {str(TESTS)!r})
settings.register_profile("repeatable", settings())
"""
ONCE = """
from pathlib import Path
def test_fails_once():
    ran = Path(__file__).with_suffix(".ran")
    first, _ = not ran.exists(), ran.touch()
    print("the first time" if first else "the second time")
    assert not first, "not yet"
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs suites given as ``NAME=source``, a part each, and judges them."""
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:randomly\n")

    def judged(**suites: str) -> Verdict:
        made = []
        for name, source in suites.items():
            (tmp_path / f"test_{name}.py").write_text(source)
            made.append(parts.pytest(name, out, f"test_{name}.py"))
        parts.run_in_lanes(parts.in_turn(made), 1)
        return parts.judge([part.result() for part in made], out)

    return judged


def test_a_test_that_passes_the_second_time_is_unstable_and_does_not_fail_the_run(run):
    verdict = run(calm="def test_a(): pass\n", once=ONCE)
    assert verdict.good
    [unstable] = verdict.unstable()
    assert unstable.nodeid == "test_once.py::test_fails_once"
    table = verdict.table()
    assert "UNSTABLE test_once.py::test_fails_once" in table
    assert "not yet" in table
    assert table.endswith("\n2 passed, 0 failed, 0 skipped")
    outputs = verdict.second_runs[unstable.nodeid].folder
    assert str(outputs) in table
    assert "the first time" in (outputs / "first.txt").read_text()
    assert "1 passed" in (outputs / "second.txt").read_text()


def test_a_test_that_fails_twice_fails_the_run(run):
    verdict = run(broken="def test_b():\n    assert 1 == 2\n", calm="def test_a(): pass\n")
    assert not verdict.good
    table = verdict.table()
    assert "FAILED test_broken.py::test_b (twice; both outputs: " in table
    assert table.count("assert 1 == 2") == 2, "both runs are shown"
    assert "make test FAILED" in table
    assert table.endswith("\n1 passed, 1 failed, 0 skipped")


PROOF = """
import pytest
from pathlib import Path
from gate import same_bits

def bit(): same_bits(1.0, 1.5, 'loss')
def tsan(): print('SUMMARY: ThreadSanitizer: data race x.cpp:3'); assert False
def ubsan(): assert False, 'a.cpp:10:5: runtime error: shift exponent 70 is too large'
def child(): assert False, 'rank 1: Traceback\\ngate.final.AlwaysRed: loss'

@pytest.mark.parametrize("fail", [bit, tsan, ubsan, child])
def test_proof(fail):
    ran = Path(__file__).with_suffix("." + fail.__name__)
    first, _ = not ran.exists(), ran.touch()
    if first:
        fail()
"""


def test_proof_is_never_unstable(run):
    verdict = run(proof=PROOF)
    assert not verdict.good
    assert len(verdict.failed()) == 4
    assert not verdict.second_runs, "it was run again"
    assert verdict.table().count("which no second run excuses") == 4


def test_a_second_run_that_passes_and_dies_excuses_nothing(run):
    dies = "    import atexit, os\n    first or atexit.register(os._exit, 7)\n"
    verdict = run(once=ONCE.replace("    print(", f"{dies}    print("))
    assert not verdict.good
    assert "exit 7, and no test failed" in verdict.table()


def test_a_runner_that_dies_fails_the_run_though_no_test_failed(run):
    verdict = run(
        dies="import os\ndef test_a(): pass\ndef test_b(): os._exit(0)\ndef test_c(): pass\n"
    )
    assert not verdict.good
    table = verdict.table()
    assert "FAILED dies: died (exit 0) before its last test" in table
    assert "DIED" in table


GUARDED = """
from gate import hang_guard
hang_guard.SECONDS_TO_EXIT = hang_guard.SECONDS_MORE = 0.5

def pytest_configure(config):
    config.pluginmanager.register(hang_guard.HangGuard())
"""
HANGS = """
import threading, pytest

def never():
    try:
        threading.Event().wait()
    except BaseException:
        never()

def exit():
    threading.Thread(target=never).start()

@pytest.mark.timeout(0.5)
def call():
    never()
"""


@pytest.mark.parametrize("where", ["exit", "call"])
def test_a_runner_that_hangs_is_ended_and_its_place_shown(run, tmp_path: Path, where: str) -> None:
    with (tmp_path / "conftest.py").open("a") as conftest:
        conftest.write(GUARDED)
    verdict = run(hangs=HANGS.replace(f"def {where}", f"def test_{where}"))
    assert not verdict.good
    table = verdict.table()
    assert "test_hangs.py" in table and "in never" in table


def test_a_part_that_takes_too_long_is_interrupted(tmp_path: Path) -> None:
    code = "import signal, sys; print('so far', flush=True); signal.pause()"
    command = [sys.executable, "-c", code]
    part = parts.Part("long", command, tmp_path, is_pytest=False, limit=1.0)
    parts.run_in_lanes(parts.in_turn([part]), 1)
    table = Verdict([part.result()]).table()
    assert "FAILED long: was interrupted after 1 s" in table and "KeyboardInterrupt" in table


def test_a_file_that_cannot_be_imported_fails_the_run(run):
    verdict = run(wrong="import no_such_module_anywhere\n", calm="def test_a(): pass\n")
    assert not verdict.good
    assert "no_such_module_anywhere" in verdict.table()


def test_a_part_without_tests_fails_the_run(run):
    assert not run(empty="").good


GATED = """
import pytest
from pathlib import Path
from gate import tiers

tiers.TESTS = Path(__file__).parent

def pytest_collection_modifyitems(items):
    for item in items:
        print("TIER", item.nodeid, tiers.tier_of(item))
"""
MARKED = {
    "test_plain.py": ("", "def test_a(): pass\n@pytest.mark.soak\ndef test_b(): pass\n"),
    "test_full.py": (
        "pytestmark = pytest.mark.full\n",
        "def test_a(): pass\n@pytest.mark.times\ndef test_b(): pass\n",
    ),
    "cluster/test_pods.py": (
        "",
        "def test_a(): pass\n@pytest.mark.parametrize('x', [1, pytest.param(2, "
        "marks=pytest.mark.soak)])\ndef test_b(x): pass\n",
    ),
}


def collect(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-qs", "--collect-only", *options]
    command += ["-o", "markers=full\ntimes\nsoak", "-c", str(folder / "pytest.ini")]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)


def test_the_tier_of_a_test_is_its_closest_markers_then_its_folders(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(CONFTEST + GATED)
    for name, (head, tests) in MARKED.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"import pytest\n{head}{tests}")
    found = re.findall(r"TIER (\S+) (\w+)", collect(tmp_path).stdout)
    assert dict(found) == {
        "test_plain.py::test_a": "test",
        "test_plain.py::test_b": "soak",
        "test_full.py::test_a": "full",
        "test_full.py::test_b": "times",
        "cluster/test_pods.py::test_a": "full",
        "cluster/test_pods.py::test_b[1]": "full",
        "cluster/test_pods.py::test_b[2]": "soak",
    }
    twice = "@pytest.mark.soak\n@pytest.mark.full\ndef test_c(): pass\n"
    (tmp_path / "test_plain.py").write_text(f"import pytest\n{twice}")
    done = collect(tmp_path)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_c is marked full and soak; a test has one tier" in done.stderr


@pytest.mark.parametrize(
    ("tier", "plans"),
    [(tiers.TEST, plan.TEST_PARTS), (tiers.FULL, plan.REST_PARTS), (tiers.TIMES, plan.TIMES_PARTS)],
)
def test_every_test_file_is_in_exactly_one_part_of_its_tier(tier, plans):
    assert {one.tier for one in plans if one.paths} == {tier}
    for path in TESTS.rglob("test_*.py"):
        folder = path.relative_to(TESTS).parts[0]
        if tier == tiers.TEST and folder in tiers.FULL_FOLDERS:
            continue
        if tier == tiers.TIMES and folder in tiers.FULL_FOLDERS:
            assert "mark.times" not in path.read_text(), f"{path}: no part of make test-times"
            continue
        found = {one.name: one.expression for one in plans if selects(one, path)}
        # Two parts may share a file if a marker decides, and one has what the other has not.
        assert len(found) == 1 or sorted(found.values()) == ["node", "not node"], (path, found)


def selects(one: plan.PartPlan, path: Path) -> bool:
    below = [path.is_relative_to(TESTS.parent / folder) for folder in one.paths]
    return any(below) and not any(path.is_relative_to(TESTS.parent / out) for out in one.but)


def test_the_names_of_parts_and_the_files_they_name_exist_once():
    every = [*plan.TEST_PARTS, *plan.REST_PARTS, *plan.TIMES_PARTS]
    for one, other in combinations(every, 2):
        assert one.name != other.name
    for one in every:
        for path in (*one.paths, *one.but):
            assert (TESTS.parent / path).exists(), f"{one.name}: {path}"


def test_the_budgets_of_the_parts_of_make_test_are_more_than_that_of_all():
    """A part that grows is thus named before the total fails, and one part alone cannot fail it."""
    of_parts = [one.budget for one in plan.TEST_PARTS]
    assert None not in of_parts
    assert sum(of_parts) >= plan.TEST_BUDGET >= max(of_parts)


def test_a_run_over_its_budget_is_red_and_names_the_part_that_grew():
    found = [PartResult("a", 0, 1.0, 90.0), PartResult("b", 0, 1.0, 45.0)]
    budgets = {"a": 100.0, "b": 20.0}
    assert budget.over_budget(found, budgets, 135.0, 1.0) is None
    assert budget.over_budget(found, budgets, 100.0, 1.5) is None
    text = budget.over_budget(found, budgets, 100.0, 1.0)
    assert text and "135 processor seconds, at most 100" in text and "`b` took 45 of 20" in text
    verdict = Verdict(found, over_budget=text)
    assert not verdict.good
    assert f"make test FAILED: {text}" in verdict.table()


def test_a_slow_machine_gets_more_processor_seconds_and_a_fast_one_no_less(monkeypatch):
    for seconds, factor in ((0.5, 1.0), (1.0, 1.0), (2.5, 2.5)):
        monkeypatch.setattr(budget, "_timed", lambda s=seconds: s * budget.REFERENCE_SECONDS)
        assert budget.slowness() == pytest.approx(factor)


class FakeTestbeds:
    def __init__(self, building=(), failed=()) -> None:
        self.unfinished, self.failed = list(building), dict(failed)

    def building(self):
        return list(self.unfinished)

    def why_failed(self, needs):
        return next((self.failed[name] for name in needs if name in self.failed), None)


def scheduled(testbeds, *, seconds_remaining=float("inf"), **needs):
    plans = [plan.PartPlan(name, needs=tuple(of.split())) for name, of in needs.items()]
    made = lambda one: parts.Part(one.name, [], Path())  # noqa: E731
    return Schedule(plans, made, testbeds, lambda: seconds_remaining)


def test_a_part_runs_when_its_testbeds_are_ready_and_others_meanwhile():
    testbeds = FakeTestbeds(building=["api"])
    schedule = scheduled(testbeds, pods="api nodes", mutants="", fuzz="clang")
    assert [part.name for part in (schedule.take(), schedule.take())] == ["mutants", "fuzz"]
    testbeds.unfinished.clear()
    last = schedule.take()
    assert last is not None and last.name == "pods"
    assert schedule.take() is None
    assert not schedule.not_run and schedule.stopped is None


def test_a_testbed_that_cannot_be_built_is_one_red_line_for_each_part():
    schedule = scheduled(FakeTestbeds(failed={"api": "no go command"}), pods="api", mutants="")
    first = schedule.take()
    assert first is not None and first.name == "mutants" and schedule.take() is None
    assert schedule.not_run == {"pods": "no go command"}
    verdict = Verdict([PartResult("pods", None, 0.0, not_run="no go command")])
    assert not verdict.good
    assert "FAILED pods: was not run: no go command" in verdict.table()


def test_a_run_without_time_for_its_testbeds_stops_with_one_line():
    testbeds = FakeTestbeds(building=["api", "guests"])
    schedule = scheduled(testbeds, seconds_remaining=-1.0, pods="api", mutants="", guests="guests")
    first = schedule.take()
    assert first is not None and first.name == "mutants", "what needs no testbed still runs"
    assert schedule.take() is None
    assert schedule.stopped is not None
    assert "api, guests still being built" in schedule.stopped
    assert schedule.stopped.endswith("did not run: pods, guests")
    not_run = [PartResult(n, None, 0.0, not_run=why) for n, why in schedule.not_run.items()]
    verdict = Verdict(not_run, command="make test-all", stopped=schedule.stopped)
    assert not verdict.good
    assert verdict.table().count("still being built") == 1


def test_tests_that_were_unstable_before_fail_the_run():
    failed = _failed("t")
    again = {"t": SecondRun(True, Path("outputs"))}
    assert Verdict([_part("a", failed)], again).good
    verdict = Verdict([_part("a", failed)], again, seen_before=["t"])
    assert not verdict.good
    assert "UNSTABLE, AND BEFORE t" in verdict.table()


def _part(name: str, *tests: results.TestResult, status: int = 1) -> PartResult:
    found = results.Results({test.nodeid: test for test in tests}, complete=True)
    return PartResult(name, status, 1.0, 0.5, found)


def _failed(nodeid: str, text: str = "") -> results.TestResult:
    return results.TestResult(nodeid, "failed", 1.0, message="why", text=text)


def test_more_than_a_few_unstable_tests_fail_the_run():
    failed = [_failed(f"t{i}") for i in range(MOST_UNSTABLE + 1)]
    again = {test.nodeid: SecondRun(True, Path("outputs")) for test in failed}
    assert Verdict([_part("a", *failed[1:])], again).good
    verdict = Verdict([_part("a", *failed)], again)
    assert not verdict.good
    assert f"{MOST_UNSTABLE + 1} unstable tests" in verdict.table()


def test_proof_is_not_excused_by_a_second_run_that_passed():
    failed = _failed("t", "E   gate.final.AlwaysRed: loss")
    assert not Verdict([_part("a", failed)], {"t": SecondRun(True, Path("outputs"))}).good


def test_an_exit_that_no_test_explains_fails_the_run():
    passed = results.TestResult("t")
    assert Verdict([_part("a", passed, status=0)], {}).good
    for status in (1, 2, 3, -9):
        assert not Verdict([_part("a", passed, status=status)], {}).good
    assert not Verdict([_part("a", _failed("t"), status=3)], {"t": SecondRun(True, Path())}).good


def test_a_command_that_is_not_pytest_is_judged_by_its_exit():
    assert Verdict([PartResult("lint", 0, 1.0)], {}).good
    assert not Verdict([PartResult("lint", 2, 1.0)], {}).good
    assert not Verdict([PartResult("lint", None, 0.0)], {}).good


def test_the_table_gives_the_cost_of_each_part_with_its_children(tmp_path):
    """A part that waits, and whose child computes."""
    compute = "import time\nwhile time.process_time() < 0.5: pass"
    waits = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {compute!r}])"
    part = parts.Part("costs", [sys.executable, "-c", waits], tmp_path, is_pytest=False)
    part.run()
    assert 0.5 <= part.processor_seconds <= 10
    result = part.result()
    [line] = [line for line in Verdict([result], {}).table().splitlines() if "costs" in line]
    assert f"{result.seconds:.0f} s" in line and f"{result.processor_seconds:.0f} s" in line


def test_a_report_that_breaks_off_is_that_of_a_run_that_died(tmp_path):
    log = tmp_path / "log.jsonl"
    assert not results.read(log).complete
    entry = {
        "user_properties": [["processor_seconds", 0.5]],
        "$report_type": "TestReport",
        "nodeid": "t",
        "when": "call",
        "outcome": "passed",
        "duration": 1.5,
        "longrepr": None,
    }
    log.write_text(json.dumps(entry) + '\n{"$report_type": "TestRep')
    read = results.read(log)
    assert not read.complete
    assert [(test.seconds, test.processor_seconds) for test in read] == [(1.5, 0.5)]


def test_same_bits_and_always_red():
    same_bits({"a": 1}, {"a": 1})
    with pytest.raises(AlwaysRed, match="loss: found 1, expected exactly 2"):
        same_bits(1, 2, "loss")
    torch = pytest.importorskip("torch")
    same_bits(torch.ones(2), torch.ones(2))
    with pytest.raises(AlwaysRed):
        same_bits(torch.ones(2), torch.ones(2, dtype=torch.float64))
    with pytest.raises(AlwaysRed), always_red():
        raise AssertionError("a mutant lives")


def test_a_test_that_only_quotes_the_exception_may_be_run_again():
    assert final.why_final("    with pytest.raises(AlwaysRed): ...\nE   assert 1 == 2") is None


def test_the_costliest_tests_are_listed_first():
    found = [results.TestResult(f"t{i}", processor_seconds=float(i)) for i in range(40)]
    table = Verdict([_part("a", *found, status=0)]).table()
    listed = [line.split()[-1] for line in table.splitlines() if " s   a " in line]
    assert listed[:15] == [f"t{i}" for i in range(39, 24, -1)]
    assert "t24\n" not in table


def test_parts_run_side_by_side_and_a_free_lane_takes_the_next(tmp_path):
    """The first of three parts in two lanes waits for a file that the third makes."""
    wait = (
        "import pathlib, sys, time\n"
        "end = time.monotonic() + 60\n"
        "while not pathlib.Path(sys.argv[1]).exists():\n"
        "    assert time.monotonic() < end, 'the third part did not start'\n"
        "    time.sleep(0.01)\n"
    )
    made = [
        parts.Part(name, [sys.executable, "-c", *command], tmp_path, is_pytest=False)
        for name, command in (
            ("first", [wait, str(tmp_path / "made")]),
            ("second", ["pass"]),
            ("third", [f"import pathlib; pathlib.Path({str(tmp_path / 'made')!r}).touch()"]),
        )
    ]
    parts.run_in_lanes(parts.in_turn(made), 2)
    assert [part.status for part in made] == [0, 0, 0], made[0].log.read_text()
