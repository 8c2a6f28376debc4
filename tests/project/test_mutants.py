"""The random mutants of ``make soak``: what is drawn, and who is said to have died."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mutants.drawing import draw, find_mutations

TESTS = Path(__file__).resolve().parents[1]
TOY = """\
def is_more(a, b):
    result = a > b
    return result


def count_down(n, step):
    while n:
        n -= step


def executed_by_no_test(a, b):
    total = a + b
"""
CONFTEST = """\
from hypothesis import settings
settings.register_profile("repeatable")
"""
TOY_TESTS = """\
from pathlib import Path
from toy.numbers import count_down, is_more

def test_is_more():
    assert is_more(2, 1)

def test_count_down():
    count_down(3, 1)

def test_that_fails_when_run_again():
    assert not is_more(1, 2)
    Path("ran").touch(exist_ok=False)
"""
MUTATED = """\
import logging
log = logging.getLogger()

def decide(a, b):
    '''Return 1.'''
    log.info("%s", a - 1)
    if a < b and not b:
        raise ValueError(f"is {a + 1}; expected {b - 1}")
    note(min(a, 7))
    return round(a, 3) is None
"""


def find(text: str) -> set[tuple[str, str]]:
    return {(m.before, m.after) for m in find_mutations("toy.py", text.encode())}


def test_kinds_of_mutations() -> None:
    condition = "a < b and not b"
    assert find(MUTATED) == {
        ("<", "<="),
        ("and", "or"),
        ("not ", ""),
        (condition, "True"),
        (condition, "False"),
        (condition, f"not ({condition})"),
        ("note(min(a, 7))", "pass"),
        ("min", "max"),
        ("7", "8"),
        ("round(a, 3) is None", "None"),
        ("is", "is not"),
    }


def test_code_outside_functions_is_not_mutated() -> None:
    assert find("LIMIT = 1\nclass Settings:\n    limit: int = LIMIT + 1\n") == set()


def test_the_same_seed_draws_the_same(tmp_path: Path) -> None:
    file = tmp_path / "toy.py"
    file.write_text(MUTATED + TOY)
    drawn = [[m.statement for m in draw({"toy.py": file}, seed)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    assert sorted(drawn[0]) == sorted(drawn[2])


def run_mutants(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "mutants", "--package", "toy", "--folder", "test_toy.py"),
            *("--tree", str(folder), "--budget", "0.2", *arguments),
        ],
        env=os.environ | {"PYTHONPATH": f"{TESTS}:{folder}"},
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy").mkdir()
    (folder / "toy" / "__init__.py").touch()
    (folder / "toy" / "numbers.py").write_text(TOY)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_toy.py").write_text(TOY_TESTS)
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return folder


@pytest.fixture(scope="module")
def report(toy: Path) -> dict[str, Any]:
    """The result of a run over all mutants of the toy."""
    ran = run_mutants(toy, "--count", "9", "--out", "out.json")
    assert ran.returncode == 1, ran.stdout + ran.stderr  # two of three are fewer than 90 %
    report: dict[str, Any] = json.loads((toy / "out.json").read_text())
    return report


def verdict_of(report: dict[str, Any], line: str) -> dict[str, Any]:
    (found,) = (one for one in report["judged"] if one["mutation"]["line"] == line)
    verdict: dict[str, Any] = found["verdict"]
    return verdict


def test_a_mutant_that_a_test_checks_is_killed(report: dict[str, Any]) -> None:
    verdict = verdict_of(report, "return result")
    assert (verdict["outcome"], verdict["by"]) == ("killed", "test_toy.py::test_is_more")


def test_a_mutant_that_no_test_checks_survives(report: dict[str, Any]) -> None:
    """A test fails under the mutant, but fails without it as well."""
    verdict = verdict_of(report, "result = a > b")
    assert verdict["outcome"] == "survived"
    assert "test_toy.py::test_is_more" in verdict["tests"]


def test_a_mutant_that_hangs_is_killed(report: dict[str, Any]) -> None:
    verdict = verdict_of(report, "n -= step")
    assert (verdict["outcome"], verdict["by"]) == ("killed", "test_toy.py::test_count_down")
    assert "hangs" in verdict["why"]


def test_a_mutant_that_no_test_executes_is_not_judged(report: dict[str, Any]) -> None:
    assert [one["line"] for one in report["not_executed"]] == ["total = a + b"]
    assert len(report["judged"]) == 3
