"""Size of the project: no figure exceeds its limit.

``python tests/project/test_size.py`` prints all figures with their limits. A commit that raises a
limit says why; one that removes much lowers it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("pipemorph", "trainer", "operator", "csrc")
SUFFIXES = {".py", ".pyi", ".cpp", ".hpp", ".html", ".js", ".css"}
MOST_LINES = 800
"""Limit of a file."""

LIMITS: Mapping[str, float] = {
    "product lines": 114_820,
    "product code lines": 84_730,
    "test lines": 108_310,
    "benchmark lines": 7_300,
    "public classes": 773,
    "modules": 462,
    "leaves of spec": 114,
    "share of comments and docstrings, percent": 14.6,
}
"""Upper limits, and a lower one for the share of comments and docstrings."""
AT_LEAST = {"share of comments and docstrings, percent"}


class Lines(NamedTuple):
    """Lines of a file. ``code``: without blank lines, comments and docstrings."""

    total: int
    code: int
    comments: int


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and "__pycache__" not in path.parts:
                yield path


def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def lines_of(path: Path) -> Lines:
    text = path.read_text()
    every = text.splitlines()
    blank = {number for number, line in enumerate(every, 1) if not line.strip()}
    if path.suffix in (".py", ".pyi"):
        comments = _python_comments(text)
    elif path.suffix in (".cpp", ".hpp", ".js"):
        comments = _comments(text, r"//[^\n]*|/\*.*?\*/")
    elif path.suffix == ".css":
        comments = _comments(text, r"/\*.*?\*/")
    else:
        comments = _comments(text, r"<!--.*?-->|(?m:^\s*//[^\n]*$)")
    return Lines(len(every), len(every) - len(blank | comments), len(comments - blank))


def _python_comments(text: str) -> set[int]:
    """Lines that have nothing but a comment or a docstring, also one of a variable."""
    docstrings, strings = set(), set()
    for node in ast.walk(ast.parse(text)):
        inner = node.value if isinstance(node, ast.Expr) else node
        if isinstance(inner, ast.JoinedStr | ast.Constant):
            lines = range(inner.lineno, (inner.end_lineno or inner.lineno) + 1)
            alone = isinstance(node, ast.Expr) and isinstance(inner, ast.Constant)
            if alone and isinstance(inner.value, str):
                docstrings.update(lines)
            elif len(lines) > 1:
                strings.update(lines)
    hashes = {i for i, line in enumerate(text.splitlines(), 1) if line.lstrip().startswith("#")}
    return docstrings | (hashes - strings)


def _comments(text: str, pattern: str) -> set[int]:
    """Lines that have nothing but what matches ``pattern``."""
    found = set()
    for match in re.finditer(pattern, text, re.DOTALL):
        begins = text.rfind("\n", 0, match.start()) + 1
        if not text[begins : match.start()].strip():
            first = text.count("\n", 0, match.start()) + 1
            found |= set(range(first, first + match[0].rstrip("\n").count("\n") + 1))
    return found


def spec_leaves() -> int:
    """Fields of ``spec`` in the CRD that have no fields below them; removed ones do not count."""
    from pipemorph_operator.crd.generate import build_job_definition

    def count(schema: dict[str, Any]) -> int:
        if "properties" in schema:
            return sum(map(count, schema["properties"].values()))
        if "properties" in (items := schema.get("items", {})):
            return count(items)
        return 0 if schema.get("description", "").startswith("Removed;") else 1

    versions = build_job_definition()["spec"]["versions"]
    return count(versions[0]["schema"]["openAPIV3Schema"]["properties"]["spec"])


def measure() -> dict[str, float]:
    """Figures of the working tree."""
    product = {path: lines_of(path) for path in sources(*PRODUCT)}
    modules = [path for path in product if path.suffix == ".py"]
    classes = [
        node
        for path in modules
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    code = sum(lines.code for lines in product.values())
    comments = sum(lines.comments for lines in product.values())
    return {
        "product lines": sum(lines.total for lines in product.values()),
        "product code lines": code,
        "test lines": sum(map(count_lines, sources("tests"))),
        "benchmark lines": sum(map(count_lines, sources("benchmarks"))),
        "public classes": len(classes),
        "modules": len([path for path in modules if path.name != "__init__.py"]),
        "leaves of spec": spec_leaves(),
        "share of comments and docstrings, percent": 100 * comments / (code + comments),
    }


@pytest.fixture(scope="module")
def measured() -> dict[str, float]:
    return measure()


@pytest.mark.parametrize("name", LIMITS)
def test_a_figure_stays_within_its_limit(name: str, measured: dict[str, float]) -> None:
    found, limit = measured[name], LIMITS[name]
    within = found >= limit if name in AT_LEAST else found <= limit
    assert within, f"{name}: {found:.6g}; the limit is {limit:.6g}"


def test_every_figure_has_a_limit(measured: dict[str, float]) -> None:
    assert measured.keys() == LIMITS.keys()


def test_files_are_short_enough() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sources(*PRODUCT, "tests", "benchmarks", "examples", "docs")
        if (lines := count_lines(path)) > MOST_LINES
    }
    assert not long, f"files of more than {MOST_LINES} lines: {long}"


def test_lines_are_classified(tmp_path: Path) -> None:
    python, cpp, html = (tmp_path / f"a.{suffix}" for suffix in ("py", "cpp", "html"))
    python.write_text('"""Doc\n\nstring."""\n\n# why\nx = 1  # here\n"""Of x."""\ny = """a\nb"""\n')
    assert lines_of(python) == Lines(9, 3, 4)
    cpp.write_text("// why\nint x;  // here\n/* a\n b */\n\nint y; /* c */\n")
    assert lines_of(cpp) == Lines(6, 2, 3)
    html.write_text("<!-- a\nb -->\n<p>\n// why\nlet x = 1; // here\n")
    assert lines_of(html) == Lines(5, 2, 3)


if __name__ == "__main__":
    for figure, value in measure().items():
        sys.stdout.write(f"{figure:45} {value:10.6g} {LIMITS.get(figure, 0):10.6g}\n")
