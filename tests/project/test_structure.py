"""The arrows of the house: trainer → core, trainer → engine, and nothing back."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN_IN_CORE = {"torch", "kubernetes", "kopf", "pipemorph_trainer", "pipemorph_operator"}


def imported_packages(path: Path) -> set[str]:
    """Top-level packages a file imports anywhere, late imports included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def test_core_imports_neither_side() -> None:
    files = sorted((ROOT / "pipemorph").rglob("*.py"))
    assert len(files) > 5, "looked in the wrong place"
    broken = {
        str(path.relative_to(ROOT)): sorted(hit)
        for path in files
        if (hit := imported_packages(path) & FORBIDDEN_IN_CORE)
    }
    assert not broken, f"the core must not import these: {broken}"


def test_trainer_does_not_import_the_operator() -> None:
    files = sorted((ROOT / "trainer").rglob("*.py"))
    assert files
    assert not [p for p in files if "pipemorph_operator" in imported_packages(p)]


def test_agent_and_command_start_without_torch() -> None:
    """The agent must start fast, and `pipemorph plan` must run where torch is not."""
    code = (
        "import sys; import pipemorph.cli, pipemorph_trainer.agent.__main__; "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr or "torch was imported"


PACKAGES = {
    "pipemorph": ROOT / "pipemorph",
    "pipemorph_trainer": ROOT / "trainer/pipemorph_trainer",
    "pipemorph_operator": ROOT / "operator/pipemorph_operator",
}
MOST_FILES = 14
"""Limit without subfolders: more files than that have no order that one sees at a glance."""


def module_file(module: str) -> Path | None:
    """File of a module of the project, None for a name that is not a module. A package's own
    ``__init__`` only hands names on, and is not followed, either."""
    package, *rest = module.split(".")
    if package not in PACKAGES:
        return None
    path = PACKAGES[package].joinpath(*rest).with_suffix(".py") if rest else None
    return path if path is not None and path.is_file() else None


def imported_files(path: Path) -> set[Path]:
    """The modules of ours that a file imports, late and type-checking imports included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {file for name in names if (file := module_file(name)) is not None}


def test_the_trainer_does_not_import_its_programs() -> None:
    """Programs are started by others, and the runtime needs none."""
    root = PACKAGES["pipemorph_trainer"]
    folders = ("bench", "examples", "launcher")
    programs = {path for folder in folders for path in root.glob(f"{folder}/*.py")}
    programs.add(root / "preflight.py")
    assert len(programs) > 6, "looked in the wrong place"
    for path in {*root.rglob("*.py")} - programs:
        assert not imported_files(path) & programs, path


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_has_a_circle_of_imports(package: str) -> None:
    """Files and subfolders of a folder stand on floors: each above all that it imports."""
    root = PACKAGES[package]
    files = [p for p in root.rglob("*.py") if p.name != "__init__.py"]
    assert len(files) > 20, "looked in the wrong place"
    arrows = {path: imported_files(path) for path in files}
    for folder in {root, *(p for p in root.rglob("*") if p.is_dir() and p.name != "__pycache__")}:
        rooms: dict[str, set[str]] = {}
        for path, targets in arrows.items():
            if not path.is_relative_to(folder):
                continue
            room = path.relative_to(folder).parts[0]
            inside = {t.relative_to(folder).parts[0] for t in targets if t.is_relative_to(folder)}
            rooms.setdefault(room, set()).update(inside - {room})
        try:
            graphlib.TopologicalSorter(rooms).prepare()
        except graphlib.CycleError as error:
            shown = " imports ".join(reversed(error.args[1]))
            pytest.fail(f"{folder.relative_to(ROOT)}: {shown}", pytrace=False)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_is_crowded(package: str) -> None:
    root = PACKAGES[package]
    folders = {root, *(p for p in root.rglob("*") if p.is_dir() and p.name != "__pycache__")}
    crowded = {
        str(folder.relative_to(ROOT)): count
        for folder in folders
        if (count := len([p for p in folder.glob("*.py") if p.name != "__init__.py"])) > MOST_FILES
    }
    assert not crowded, f"more than {MOST_FILES} files in a folder: {crowded}"


def test_no_two_files_of_fixtures_have_one_of_the_same_name() -> None:
    """A module's plugins are those of the whole run: of two fixtures of one name, that of the
    plugin which is loaded later would be every test's, whichever it asks for."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.stem.endswith("_fixtures")]
    homes: dict[str, list[str]] = {}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and "fixture" in ast.dump(
                ast.Module(node.decorator_list, [])
            ):
                homes.setdefault(node.name, []).append(path.name)
    assert len(files) > 1 and homes
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_no_two_modules_of_tests_have_the_same_name() -> None:
    """pytest imports them by name: together such two could not be run."""
    homes: dict[str, list[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        homes.setdefault(path.stem, []).append(str(path.parent.relative_to(ROOT)))
    assert len(homes) > 1
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
