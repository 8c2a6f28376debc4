"""Parts that need not run again, and the tests that a change reaches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gate import reads, records, testbeds
from gate.impact import ImportGraph, changed_files, choose
from gate.reads import CACHED, CannotTrace, ReadTracer, source_of
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


READ = {Path("a"), Path("a/one.py"), Path("b/out.log"), Path("/elsewhere")}


def recorded(root: Path, environment: str = "e") -> records.Record | None:
    return records.find_valid("part", records.Sources(root), environment)


def test_a_part_is_unchanged_until_something_that_it_read_changes(checkout):
    assert recorded(checkout) is None
    assert records.add("part", records.Sources(checkout), "e", READ, 7)
    found = recorded(checkout)
    assert found is not None and found.passed == 7
    assert found.commit == git(checkout, "rev-parse", "--short", "HEAD").strip()
    assert set(found.read) == {"a", "a/one.py"}, "what git ignores, and what is elsewhere, is not"
    (checkout / "a/two.py").write_text("TWO = 3\n")
    (checkout / "b/new.txt").write_text("not read")
    assert recorded(checkout) is not None
    assert recorded(checkout, "another compiler") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "a/one.py").write_text("ONE = 2\n"),
        lambda root: (root / "a/one.py").unlink(),
        lambda root: (root / "a/three.py").write_text(""),
    ],
    ids=["a file", "a file that is gone", "a new file in a folder that was listed"],
)
def test_a_change_of_a_file_that_was_read_runs_the_part_again(checkout, change):
    assert records.add("part", records.Sources(checkout), "e", READ, 7)
    change(checkout)
    assert recorded(checkout) is None


def test_a_record_is_valid_again_when_the_files_come_back(checkout):
    """Branches take turns: neither of two makes the other's record invalid."""
    for text in ("ONE = 1\n", "ONE = 2\n"):
        (checkout / "a/one.py").write_text(text)
        assert records.add("part", records.Sources(checkout), "e", READ, 7)
    for text, known in (("ONE = 1\n", True), ("ONE = 2\n", True), ("ONE = 3\n", False)):
        (checkout / "a/one.py").write_text(text)
        assert (recorded(checkout) is not None) == known


def test_a_part_during_which_its_files_changed_is_not_recorded(checkout):
    before = records.Sources(checkout)
    (checkout / "a/one.py").write_text("ONE = 2\n")
    assert not records.add("part", before, "e", READ, 7)
    assert recorded(checkout) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1, "records": [{"x": 1}]}'])
def test_a_record_that_cannot_be_read_is_no_record(checkout, content):
    assert records.add("part", records.Sources(checkout), "e", READ, 7)
    [path] = records.folder().glob("part.json")
    path.write_text(content)
    assert recorded(checkout) is None


def test_fresh_is_the_users_word(monkeypatch):
    for value, fresh in {"": False, "0": False, "1": True}.items():
        monkeypatch.setenv("FRESH", value)
        assert records.fresh() == fresh


def test_a_test_that_is_unstable_twice_in_fourteen_days_is_named():
    assert records.note_unstable(["a", "b"], now=0.0) == []
    assert records.note_unstable(["b", "c"], now=13 * DAY) == ["b"]
    assert records.note_unstable(["c", "a"], now=20 * DAY) == ["c"], "a was too long ago"
    assert records.note_unstable([], now=21 * DAY) == []


def test_compiled_files_count_as_their_sources():
    assert source_of(Path("a/__pycache__/one.cpython-311.pyc")) == Path("a/one.py")
    assert source_of(Path("a/__pycache__/one.cpython-311-pytest-8.pyc")) == Path("a/one.py")
    assert source_of(Path("a/__pycache__")) == Path("a")
    assert source_of(Path("a/one.cpp")) == Path("a/one.cpp")


def test_the_tracer_sees_files_that_any_process_of_a_part_opens(checkout, monkeypatch):
    """A child of a child, an import from a compiled file, and a process of no part, which counts
    for each."""
    (checkout / "a" / CACHED).mkdir()
    # Own variable, since this test may run within a part itself.
    monkeypatch.setattr(reads, "VARIABLE", "PART_OF_THIS_TEST")

    def environment(part: str | None) -> dict[str, str]:
        return {"PATH": os.environ["PATH"]} | ({reads.VARIABLE: part} if part else {})

    def run(part: str | None, *command: str) -> None:
        env = environment(part)
        subprocess.run(command, check=True, cwd=checkout, env=env, stdout=subprocess.DEVNULL)

    run(None, sys.executable, "-c", "import a.one, a.two")
    try:
        tracer = ReadTracer(checkout, [Path("a"), Path("a") / CACHED, Path("b")])
    except CannotTrace as error:
        assert os.geteuid() != 0, error
        pytest.skip(f"tracing needs root: {error}")
    with tracer:
        run("first", "sh", "-c", f"env -i {sys.executable} -c 'import a.one'; true")
        # The child lives until it was seen: one that has ended would count for every part.
        command = ["sh", "-c", "exec 3<b/data.txt; read line"]
        env = environment("second")
        with subprocess.Popen(command, cwd=checkout, env=env, stdin=subprocess.PIPE):
            until(
                lambda: Path("b/data.txt") in (tracer.opened_by("second") or ()),
                "the tracer sees what the second part opened",
            )
        run(None, "cat", "a/two.py")
    first, second = tracer.opened_by("first"), tracer.opened_by("second")
    assert first is not None and second is not None
    assert Path("a/one.py") in first and Path("b/data.txt") not in first
    assert Path("b/data.txt") in second
    assert Path("a/two.py") in first & second
    assert tracer.opened_by("first", "second") == first | second


FAKE_TESTBEDS = f"""
import json, os, sys
part = os.environ.get({reads.VARIABLE!r}, "no part")
if "--status" in sys.argv:
    print(json.dumps({{"api": {{"ready": False, "why": part}}}}))
else:
    sys.exit(part)
"""


def test_files_of_the_build_of_testbeds_are_not_read_by_every_part(tmp_path, monkeypatch):
    """Images are built of all sources: no sanitizer is to run again for these."""
    (tmp_path / "testbeds.py").write_text(FAKE_TESTBEDS)
    monkeypatch.setattr(testbeds, "COMMAND", tmp_path / "testbeds.py")
    said: list[str] = []
    with TestbedBuild(["api"], tmp_path / "log", said.append) as build:
        why = until(lambda: build.why_failed(["api"]), "the build ends")
    assert why == f"testbed api: {testbeds.PART}"
    assert f"FAILED: ['{testbeds.PART}']" in said[-1]


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
