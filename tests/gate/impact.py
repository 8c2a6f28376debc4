"""The test files that a change reaches, by the import graph: ``make check``.

A test file is reached if it, or what it imports, or a ``conftest.py`` above it, is changed or
imports something that is. C++ sources reach the tests of the engine, other files the tests whose
text names them or their top folder. Processes that a test starts by their command line are not
followed: `make test` runs those.
"""

from __future__ import annotations

import ast
import subprocess
from collections import deque
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

SOURCE_ROOTS = (".", "trainer", "operator", "tests", "tests/support", "tests/cluster", "benchmarks")
"""Folders that modules are imported from."""
NAMED_FOLDERS = {"charts", "crds", "docs", "examples", "release"}
"""Top folders of files that tests read; a test that does has the folder's name in its text."""
UNKNOWN_COST = 4.0
"""Processor seconds of a test file that `make test` has not run yet."""
COMPILED = ("csrc", "CMakeLists.txt")
ENGINE = Path("tests/engine")


class ImportGraph:
    """The Python files of a checkout and what they import.

    ``files``: relative to ``root``, as git lists them.
    """

    def __init__(self, root: Path, files: Iterable[Path]) -> None:
        self._root = root
        self._files = set(files)
        self._python = {path for path in self._files if path.suffix == ".py"}

    @cached_property
    def _modules(self) -> Mapping[str, set[Path]]:
        """The files that a module's name may mean: tests import from folders of their own."""
        found: dict[str, set[Path]] = {}
        for path in self._python:
            for base in {*map(Path, SOURCE_ROOTS), path.parent}:
                if path.is_relative_to(base):
                    parts = path.relative_to(base).with_suffix("").parts
                    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                    if name:
                        found.setdefault(name, set()).add(path)
        return found

    def imports(self, path: Path) -> set[Path]:
        """The files that a Python file imports, wherever in it, with the packages around them."""
        found: set[Path] = set()
        for name in _imported_names(ast.parse((self._root / path).read_text()), path):
            parts = name.split(".")
            for length in range(1, len(parts) + 1):
                found |= self._modules.get(".".join(parts[:length]), set())
        return {other for other in found if _can_import(path, other)} - {path}

    def tests_reached(self, changed: Iterable[Path]) -> dict[Path, int]:
        """The test files that a change of these files reaches, and by how many imports."""
        importers: dict[Path, set[Path]] = {}
        for path in self._python:
            for imported in self.imports(path) | self._conftests(path):
                importers.setdefault(imported, set()).add(path)
        distance = dict.fromkeys(changed, 0)
        waiting = deque(distance)
        while waiting:
            near = waiting.popleft()
            for path in importers.get(near, ()):
                if path not in distance:
                    distance[path] = distance[near] + 1
                    waiting.append(path)
        tests = {path for path in self._python if is_test(path)}
        others = {path for path in distance if path.suffix != ".py"}
        by_name = dict.fromkeys(self._naming(others, tests), 1)
        return by_name | {path: n for path, n in distance.items() if path in tests}

    def _conftests(self, path: Path) -> set[Path]:
        return {folder / "conftest.py" for folder in path.parents} & self._python - {path}

    def _naming(self, others: set[Path], tests: set[Path]) -> set[Path]:
        """The tests of what is compiled, and those with a name of these files in their text."""
        compiled = {path for path in others if path.parts[0] in COMPILED}
        found = {path for path in tests if compiled and path.is_relative_to(ENGINE)}
        names = {path.name for path in others - compiled}
        names |= {path.parts[0] for path in others} & NAMED_FOLDERS
        if names:
            found |= {p for p in tests if any(n in (self._root / p).read_text() for n in names)}
        return found


def choose(
    reached: Mapping[Path, int], costs: Mapping[str, float], most: float
) -> tuple[list[Path], list[Path]]:
    """The nearest test files that together cost at most ``most`` processor seconds, as far as the
    ``costs`` of files are known; and the deferred ones."""
    chosen: list[Path] = []
    deferred: list[Path] = []
    total = 0.0
    for path in sorted(reached, key=lambda path: (reached[path], str(path))):
        total += costs.get(str(path), UNKNOWN_COST)
        (chosen if total <= most or not chosen else deferred).append(path)
    return chosen, deferred


def is_test(path: Path) -> bool:
    return path.parts[0] == "tests" and path.name.startswith("test_")


def _can_import(path: Path, other: Path) -> bool:
    """True if a module of this name in ``other`` is meant: only tests import tests."""
    return other.parts[0] != "tests" or path.parts[0] == "tests"


def _imported_names(tree: ast.AST, path: Path) -> Iterable[str]:
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = path.parent.parts[: len(path.parent.parts) - node.level + 1]
                base = ".".join([*package, *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _statements(node: ast.AST) -> Iterable[ast.stmt]:
    """Statements in a tree, without its expressions, which cannot import."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, field, ())
        for child in inner if isinstance(inner, list) else ():
            if isinstance(child, ast.stmt):
                yield child
            yield from _statements(child)


def changed_files(root: Path, base: str | None) -> tuple[str, set[Path]]:
    """Changes from ``base`` in the checkout, with files that git does not track yet: the commit
    that was compared with, and the paths. Without a base: from the merge base with ``origin/main``
    or ``main``, else from the last commit."""
    if base is None:
        for upstream in ("origin/main", "main"):
            found = _git(root, "merge-base", "HEAD", upstream, check=False).strip()
            if found:
                base = found
                break
        else:
            base = "HEAD"
    commit = _git(root, "rev-parse", "--short", base).strip()
    named = _git(root, "diff", "--name-only", "-z", base).split("\0")
    named += _git(root, "ls-files", "-z", "--others", "--exclude-standard").split("\0")
    return commit, {Path(name) for name in named if name}


def list_files(root: Path) -> set[Path]:
    """The files of a checkout that git tracks or would add, relative to ``root``."""
    named = _git(root, "ls-files", "-z", "-co", "--exclude-standard").split("\0")
    return {Path(name) for name in named if name and (root / name).is_file()}


def _git(root: Path, *arguments: str, check: bool = True) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=check, capture_output=True, text=True).stdout
