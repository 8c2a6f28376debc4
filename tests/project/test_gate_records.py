"""Tests that were unstable, and the tests that a change reaches."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from gate import records, testbeds
from gate.impact import ImportGraph, changed_files, choose
from gate.testbeds import TestbedBuild
from waiting import until

DAY = 86400.0


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def checkout(tmp_path):
    """A repository with two files in ``a``, one in ``b``, and one that git ignores."""
    root = tmp_path / "checkout"
    for name, text in {
        "a/one.py": "ONE = 1\n",
        "a/two.py": "TWO = 2\n",
        "b/data.txt": "x",
        ".gitignore": "*.log\n",
        "b/out.log": "",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(tmp_path, "init", "-q", "-b", "main", str(root))
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "all")
    return root


def test_a_test_that_is_unstable_twice_in_fourteen_days_is_named():
    assert records.note_unstable(["a", "b"], now=0.0) == []
    assert records.note_unstable(["b", "c"], now=13 * DAY) == ["b"]
    assert records.note_unstable(["c", "a"], now=20 * DAY) == ["c"], "a was too long ago"
    assert records.note_unstable([], now=21 * DAY) == []


FAKE_TESTBEDS = """
import json, sys
if "--status" in sys.argv:
    print(json.dumps({"api": {"ready": False, "why": "no go command"}}))
else:
    sys.exit("no go command")
"""


def test_a_testbed_whose_build_fails_is_named_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "testbeds.py").write_text(FAKE_TESTBEDS)
    monkeypatch.setattr(testbeds, "COMMAND", tmp_path / "testbeds.py")
    said: list[str] = []
    with TestbedBuild(["api"], tmp_path / "log", said.append) as build:
        why = until(lambda: build.why_failed(["api"]), "the build ends")
    assert why == "testbed api: no go command"
    assert "FAILED: ['no go command']" in said[-1]


GRAPH = {
    "pipemorph/__init__.py": "",
    "pipemorph/low.py": "",
    "pipemorph/middle.py": "def f():\n    from pipemorph import low\n",
    "pipemorph/other.py": "",
    "tests/support/helper.py": "import pipemorph.middle\n",
    "tests/core/conftest.py": "",
    "tests/core/test_low.py": "from pipemorph.low import x\n",
    "tests/core/test_helper.py": "import helper\n",
    "tests/core/test_other.py": "try:\n    from pipemorph import other\nfinally:\n    pass\n",
    "tests/core/test_chart.py": "CHART = 'charts'\n",
    "tests/engine/test_suite.py": "",
    "charts/x/values.yaml": "",
    "csrc/os/fd.cpp": "",
}


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("pipemorph/low.py", {"core/test_low.py": 1, "core/test_helper.py": 3}),
        ("pipemorph/other.py", {"core/test_other.py": 1}),
        ("tests/core/test_low.py", {"core/test_low.py": 0}),
        ("charts/x/values.yaml", {"core/test_chart.py": 1}),
        ("csrc/os/fd.cpp", {"engine/test_suite.py": 1}),
        ("README.md", {}),
    ],
)
def test_a_change_reaches_its_importers(tmp_path, changed, reached):
    for name, text in GRAPH.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    graph = ImportGraph(tmp_path, map(Path, GRAPH))
    found = graph.tests_reached([Path(changed)])
    assert {str(path.relative_to("tests")): n for path, n in found.items()} == reached
    below = graph.tests_reached([Path("tests/core/conftest.py")])
    assert {path.name for path in below} == {
        path.rpartition("/")[2] for path in GRAPH if "core/test_" in path
    }


def test_the_nearest_tests_are_chosen_within_the_budget():
    reached = {Path(name): n for name, n in {"near": 1, "far": 3, "middle": 2}.items()}
    costs = {"near": 5.0, "middle": 5.0, "far": 5.0}
    assert choose(reached, costs, 10.0) == ([Path("near"), Path("middle")], [Path("far")])
    assert choose(reached, costs, 1.0)[0] == [Path("near")], "one at least"
    assert choose({}, costs, 1.0) == ([], [])


def test_changed_files_are_those_that_differ_from_the_branch_point(checkout):
    began = git(checkout, "rev-parse", "--short", "HEAD").strip()
    git(checkout, "checkout", "-q", "-b", "mine")
    (checkout / "a/one.py").write_text("ONE = 2\n")
    git(checkout, "commit", "-q", "-am", "one")
    (checkout / "a/two.py").write_text("TWO = 3\n")
    (checkout / "b/new.txt").write_text("")
    expected = {Path("a/one.py"), Path("a/two.py"), Path("b/new.txt")}
    assert changed_files(checkout, None) == (began, expected)
    assert changed_files(checkout, "HEAD")[1] == expected - {Path("a/one.py")}
