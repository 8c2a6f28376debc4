"""Names and words of the project: no figure exceeds its limit.

``python tests/project/test_words.py`` prints all figures beside their limits, and what to change.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("pipemorph", "trainer", "operator")
DIALECT = re.compile(r"\b(?:told|asked|left|kept|heard|nobody|sick|beside|whoever)\b", re.I)
"""Words that stand for a missing noun or verb: say which object, and what happens to it."""
OPENINGS = frozenset(
    re.findall(
        r"\S+",
        """all also and another as at before beside both by each for from how if in it its like nor
        not nothing of on one or others per since so such that the-same their them these they this
        those though to under until what when where whether which while who whoever whose why with
        within without""",
    )
)
"""First words of a docstring that name no object: pronouns, prepositions, conjunctions."""

LIMITS: Mapping[str, float] = {
    "one-word names of functions, percent": 40,
    "mean length of function names": 11,
    "class names used twice": 0,
    "docstrings that begin without their noun or verb": 0,
    "dialect words per 10,000 lines": 30,
}
AT_LEAST = {"mean length of function names"}


def sources(*folders: str, suffixes: frozenset[str] = frozenset({".py"})) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in suffixes and "__pycache__" not in path.parts:
                yield path


def iterate_definitions(*folders: str) -> Iterator[tuple[Path, ast.stmt]]:
    """Functions and classes, nested ones included."""
    for path in sources(*folders):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield path, node


def is_counted(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True unless the function is a property, a fixture or a special method."""
    marks = " ".join(map(ast.unparse, node.decorator_list))
    exempt = ("property", "fixture", ".setter", "overload")
    return not re.fullmatch(r"__\w+__", node.name) and not any(mark in marks for mark in exempt)


def find_bad_openings(*folders: str) -> list[str]:
    """``file:line: first words`` of each docstring that begins with one of :data:`OPENINGS`."""
    found = []
    for path in sources(*folders):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ):
                continue
            words = re.findall(r"[\w'-]+", (ast.get_docstring(node) or "").split("\n")[0].lower())[
                :2
            ]
            if words and (words[0] in OPENINGS or "-".join(words) in OPENINGS):
                line = getattr(node, "lineno", 1)
                found.append(f"{path.relative_to(ROOT)}:{line}: {' '.join(words)}")
    return found


def measure() -> dict[str, float]:
    """Figures of the working tree."""
    nodes = [node for _, node in iterate_definitions(*PRODUCT)]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    functions = [node for node in nodes if not isinstance(node, ast.ClassDef)]
    names = [n.name.strip("_") for n in functions if is_counted(n)]  # type: ignore[arg-type, attr-defined]
    kinds = frozenset({".py", ".pyi", ".cpp", ".hpp", ".html", ".js", ".md"})
    texts = [
        path.read_text()
        for path in sources(*PRODUCT, "csrc", "tests", "benchmarks", "docs", suffixes=kinds)
        if path != Path(__file__).resolve()
    ]
    lines = sum(text.count("\n") for text in texts)
    return {
        "one-word names of functions, percent": 100 * sum("_" not in n for n in names) / len(names),
        "mean length of function names": sum(map(len, names)) / len(names),
        "class names used twice": sum(count > 1 for count in classes.values()),
        "docstrings that begin without their noun or verb": len(
            find_bad_openings(*PRODUCT, "tests", "benchmarks")
        ),
        "dialect words per 10,000 lines": 1e4 * sum(len(DIALECT.findall(t)) for t in texts) / lines,
    }


@pytest.fixture(scope="module")
def measured() -> dict[str, float]:
    return measure()


@pytest.mark.parametrize("name", LIMITS)
def test_a_figure_stays_within_its_limit(name: str, measured: dict[str, float]) -> None:
    found, limit = measured[name], LIMITS[name]
    within = found >= limit if name in AT_LEAST else found <= limit
    assert within, f"{name}: {found:.4g}; the limit is {limit:g}"


def test_docstrings_begin_with_their_noun_or_verb() -> None:
    bad = find_bad_openings(*PRODUCT, "tests", "benchmarks")
    assert not bad, "\n".join(bad)


if __name__ == "__main__":
    for figure, value in measure().items():
        sys.stdout.write(f"{figure:55} {value:8.4g} {LIMITS[figure]:8g}\n")
    sys.stdout.write("\n".join([*find_bad_openings(*PRODUCT, "tests", "benchmarks"), ""]))
