"""The gate itself: what a second run excuses, what it never excuses, and what the table says."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from itertools import combinations, product
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from gate import AlwaysRed, always_red, final, parts, plan, results, same_bits
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

PLAN = (*plan.BESIDE, *plan.ALONE)


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
        parts.run_beside(made, 1)
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
    kept = verdict.second_runs[unstable.nodeid].folder
    assert str(kept) in table
    assert "the first time" in (kept / "first.txt").read_text()
    assert "1 passed" in (kept / "second.txt").read_text()


def test_a_test_that_fails_twice_fails_the_run(run):
    verdict = run(broken="def test_b():\n    assert 1 == 2\n", calm="def test_a(): pass\n")
    assert not verdict.good
    table = verdict.table()
    assert "FAILED test_broken.py::test_b (twice; both outputs: " in table
    assert table.count("assert 1 == 2") == 2, "both runs are told"
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


def test_an_error_in_the_set_up_is_run_again_as_well(run):
    verdict = run(
        setup="import pytest\n"
        + ONCE.replace("def test_fails_once():", "@pytest.fixture\ndef ready():")
        + "def test_it(ready): pass\n"
    )
    assert verdict.good
    assert [test.nodeid for test in verdict.unstable()] == ["test_setup.py::test_it"]


def test_a_runner_that_dies_fails_the_run_though_no_test_failed(run):
    verdict = run(
        dies="import os\ndef test_a(): pass\ndef test_b(): os._exit(0)\ndef test_c(): pass\n"
    )
    assert not verdict.good
    table = verdict.table()
    assert "FAILED dies: died (exit 0) before its last test" in table
    assert "DIED" in table


def test_a_file_that_cannot_be_imported_fails_the_run(run):
    verdict = run(wrong="import no_such_module_anywhere\n", calm="def test_a(): pass\n")
    assert not verdict.good
    assert "no_such_module_anywhere" in verdict.table()


def test_a_part_without_tests_fails_the_run(run):
    assert not run(empty="").good


MARKERS = ("cluster", "node", "quiet", "rdma", "soak", "untimed")


def test_every_test_is_in_exactly_one_part():
    """Whatever its markers, in whatever folder: but for soak, and for untimed together with what
    `tests/conftest.py` refuses."""
    folders = {f"tests/{path.relative_to(TESTS).parts[0]}" for path in TESTS.rglob("test_*.py")}
    assert folders >= {folder for part in PLAN for folder in (*part.folders, *part.but)} - {"tests"}
    for folder, count in product(folders, range(len(MARKERS) + 1)):
        for markers in combinations(MARKERS, count):
            if "untimed" in markers and {*markers} & {"cluster", "node", "quiet", "rdma"}:
                continue
            if {"cluster", "node"} & {*markers} and folder != plan.CLUSTER:
                continue
            if "rdma" in markers and folder != plan.RDMA:
                continue
            found = [
                part.name
                for part in PLAN
                if part.looks_into(folder)
                and Expression.compile(part.markers).evaluate(lambda name, **_: name in markers)  # noqa: B023
            ]
            assert len(found) == ("soak" not in markers), (folder, markers, found)


@pytest.mark.parametrize(
    ("markers", "folder"), [(("cluster", "node"), plan.CLUSTER), (("rdma",), plan.RDMA)]
)
def test_tests_that_one_part_looks_for_in_one_folder_are_in_it(markers, folder):
    inside = TESTS.parent / folder
    here = [path for path in TESTS.rglob("test_*.py") if path.is_relative_to(inside)]
    others = [path for path in TESTS.rglob("test_*.py") if path not in here]
    for marker in markers:
        used = [path for path in TESTS.rglob("test_*.py") if f".mark.{marker}" in path.read_text()]
        assert set(used) & set(here), f"no test is marked {marker}"
        assert not set(used) & set(others) - {Path(__file__)}, f"gate/plan.py leaves out {marker}"


def test_pytest_knows_the_markers_of_parts_whatever_folder_it_looks_into():
    """A part whose expression has a marker that only another folder's conftest.py names ends."""
    settings = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())
    known = settings["tool"]["pytest"]["ini_options"]["markers"]
    assert {*MARKERS} <= {line.partition(":")[0] for line in known}
    words = {word for part in PLAN for word in re.findall(r"\w+", part.markers)}
    assert words - {"not", "and", "or"} <= {*MARKERS}


def test_the_files_with_quiet_tests_are_known():
    marked = {path for path in TESTS.rglob("test_*.py") if ".mark.quiet" in path.read_text()}
    assert {TESTS / file for file in plan.PARTLY_QUIET} == marked - {Path(__file__)}
    assert not {*plan.PARTLY_QUIET} & {*plan.QUIET}


def test_pytest_takes_the_folders_and_markers_of_a_part(run, tmp_path):
    """That of a part with everything: the folder left out, the markers, and the time limit."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    soak\n    untimed\n")
    source = "import pytest\n@pytest.mark.untimed\ndef test_it(request): assert "
    limit = "float(request.config.getini('timeout')) == 7\n"
    for folder, text in {"here": source + limit, "left_out": source + "0\n"}.items():
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / f"test_{folder}.py").write_text(text)
    slow = "@pytest.mark.soak\ndef test_long(): assert 0\ndef test_other(): assert 0\n"
    (tmp_path / "tests/here/test_more.py").write_text(f"import pytest\n{slow}")
    chosen = plan.Selection("p", "untimed", but=("tests/left_out",), timeout=7)
    part = parts.pytest(chosen.name, tmp_path / "out", *chosen.arguments)
    part.run()
    found = part.result().results
    assert [(test.nodeid, test.outcome) for test in found or ()] == [
        ("tests/here/test_here.py::test_it", "passed")
    ]


def _part(name: str, *tests: results.TestResult, status: int = 1) -> PartResult:
    found = results.Results({test.nodeid: test for test in tests}, complete=True)
    return PartResult(name, status, 1.0, 0.5, found)


def _failed(nodeid: str, text: str = "") -> results.TestResult:
    return results.TestResult(nodeid, "failed", 1.0, "why", text)


def test_more_than_a_few_unstable_tests_fail_the_run():
    failed = [_failed(f"t{i}") for i in range(MOST_UNSTABLE + 1)]
    again = {test.nodeid: SecondRun(True, Path("kept")) for test in failed}
    assert Verdict([_part("a", *failed[1:])], again).good
    verdict = Verdict([_part("a", *failed)], again)
    assert not verdict.good
    assert f"{MOST_UNSTABLE + 1} unstable tests" in verdict.table()


def test_proof_is_not_excused_by_a_second_run_that_passed():
    failed = _failed("t", "E   gate.final.AlwaysRed: loss")
    assert not Verdict([_part("a", failed)], {"t": SecondRun(True, Path("kept"))}).good


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


def test_the_table_says_what_each_part_cost_its_children_included(tmp_path):
    """A part that waits, and whose child computes."""
    compute = "import time\nwhile time.process_time() < 0.5: pass"
    waits = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {compute!r}])"
    part = parts.Part("costs", [sys.executable, "-c", waits], tmp_path, is_pytest=False)
    part.run()
    assert 0.5 <= part.processor_seconds <= 10
    result = part.result()
    [line] = [line for line in Verdict([result], {}).table().splitlines() if "costs" in line]
    assert f"{result.seconds:.0f} s" in line and f"{result.processor_seconds:.0f} s" in line


def test_the_slowest_tests_are_listed_longest_first():
    tests = [results.TestResult(f"t{i}", seconds=float(i)) for i in range(40)]
    table = Verdict([_part("a", *tests, status=0)], {}).table()
    listed = [line.split()[-1] for line in table.splitlines() if " s   a " in line]
    assert listed[:15] == [f"t{i}" for i in range(39, 24, -1)]
    assert "t24\n" not in table


def test_a_report_that_breaks_off_is_that_of_a_run_that_died(tmp_path):
    log = tmp_path / "log.jsonl"
    assert not results.read(log).complete
    entry = {
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
    assert [test.seconds for test in read] == [1.5]


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
    parts.run_beside(made, 2)
    assert [part.status for part in made] == [0, 0, 0], made[0].log.read_text()
