"""Records of parts that passed, so that a part is skipped while all that it read is the same; and
of tests that were unstable.

They are in ``$XDG_CACHE_HOME/pipemorph/tests``. ``FRESH=1`` runs every part, whatever is recorded.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MOST_RECORDS = 8
"""Records of a part: so many branches can take turns in one cache."""
FORMAT = 1
UNSTABLE_DAYS = 14
_TOOLCHAIN = (
    (os.environ.get("CXX", "c++"), "--version"),
    ("clang++", "--version"),
    ("cmake", "--version"),
    ("go", "version"),
)


def folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pipemorph" / "tests"


def fresh() -> bool:
    """True if the user requested a run of every part."""
    return os.environ.get("FRESH", "") not in ("", "0")


@dataclass(frozen=True)
class Record:
    """A run of a part in which every test passed the first time."""

    commit: str
    """Commit as ``git describe`` names it."""
    when: float
    passed: int
    environment: str
    """Hash of the toolchain and the installed Python packages."""
    read: dict[str, str] = field(default_factory=dict)
    """Path, relative to the checkout, and hash of its content (a file) or its names (a folder)."""


class Sources:
    """The files of a checkout that git tracks or would add, with hashes of them as they were when
    this was made."""

    def __init__(self, root: Path) -> None:
        self.root = root
        command = ["git", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard"]
        done = subprocess.run(command, check=True, capture_output=True)
        named = [Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name]
        self.files = {path for path in named if (root / path).is_file()}
        names: dict[Path, set[str]] = {}
        for path in self.files:
            for inner, outer in zip([path, *path.parents], path.parents, strict=False):
                names.setdefault(outer, set()).add(inner.name)
        self.folders = set(names)
        self._hashes = {path: _digest((root / path).read_bytes()) for path in self.files}
        for path, inside in names.items():
            self._hashes[path] = _digest("\n".join(sorted(inside)).encode())

    def below(self, path: str) -> set[Path]:
        """A file, or all files of a folder."""
        return {file for file in self.files if file.is_relative_to(path)}

    def hash_of(self, path: Path) -> str:
        """Hash of a file's content or of the names in a folder."""
        return self._hashes.get(path, "absent")


def find_valid(part: str, sources: Sources, environment: str) -> Record | None:
    """The newest record of a part for this ``environment`` of which everything read is the same."""
    for record in sorted(_read(part), key=lambda record: -record.when):
        if record.environment == environment and all(
            sources.hash_of(Path(path)) == known for path, known in record.read.items()
        ):
            return record
    return None


def add(part: str, sources: Sources, environment: str, read: Iterable[Path], passed: int) -> bool:
    """Record that the part passed, having read these paths, relative to the checkout, except those
    that git ignores. Returns false, and records nothing, if one of them has changed since
    ``sources`` was made."""
    paths = sorted(set(read) & (sources.files | sources.folders))
    found = {str(path): sources.hash_of(path) for path in paths}
    now = Sources(sources.root)
    if any(now.hash_of(Path(path)) != known for path, known in found.items()):
        return False
    new = Record(describe(sources.root), time.time(), passed, environment, found)
    others = [record for record in _read(part) if record.read != new.read]
    newest = sorted([*others, new], key=lambda record: -record.when)[:MOST_RECORDS]
    _write(_file(part), {"format": FORMAT, "records": [asdict(record) for record in newest]})
    return True


def describe(root: Path) -> str:
    """The commit of a checkout, with ``-dirty`` if it has changes."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def environment_hash() -> str:
    """Hash of compilers, Python, kernel and installed packages."""
    said = [platform.python_version(), platform.machine(), platform.release()]
    for program, option in _TOOLCHAIN:
        found = shutil.which(program) or shutil.which(
            program, path=str(Path(sys.executable).parent)
        )
        if found is not None:
            done = subprocess.run([found, option], check=False, capture_output=True, text=True)
            said.append(done.stdout)
    packages = {f"{d.name}=={d.version}" for d in importlib.metadata.distributions()}
    return _digest("\n".join([*said, *sorted(packages)]).encode())


def note_unstable(names: Sequence[str], now: float | None = None) -> list[str]:
    """Record tests that failed and passed when run again. Returns those that were unstable in an
    earlier run of the last :data:`UNSTABLE_DAYS` days as well."""
    now = time.time() if now is None else now
    path = folder() / "unstable.json"
    since = now - UNSTABLE_DAYS * 86400
    known = [e for e in _load(path).get("unstable", []) if e["when"] > since]
    before = {entry["test"] for entry in known}
    if names:
        known += [{"test": name, "when": now} for name in names]
        _write(path, {"format": FORMAT, "unstable": known})
    return [name for name in names if name in before]


def note_costs(costs: Mapping[str, float]) -> None:
    """Record the processor seconds of test files, by path."""
    _write(folder() / "costs.json", {"format": FORMAT, "costs": {**known_costs(), **costs}})


def known_costs() -> dict[str, float]:
    """Processor seconds of test files in their last run, by path."""
    found: dict[str, float] = _load(folder() / "costs.json").get("costs", {})
    return found


def _file(part: str) -> Path:
    return folder() / f"{part.replace(' ', '-')}.json"


def _read(part: str) -> list[Record]:
    try:
        return [Record(**entry) for entry in _load(_file(part)).get("records", [])]
    except TypeError:  # an entry of another version's making
        return []


def _load(path: Path) -> dict[str, Any]:
    """Content of a file: empty if it is absent or unreadable, since records only save time."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and found.get("format") == FORMAT else {}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(content, indent=1))
    scratch.rename(path)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
