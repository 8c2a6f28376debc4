"""Records of parts that passed, so that a part is skipped while all that it reads is the same; and
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MOST_RECORDS = 8
"""Of one part: so many branches can take turns in one cache."""
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
    """Whether the user asked for every part to run."""
    return os.environ.get("FRESH", "") not in ("", "0")


def key_of(root: Path, reads: Sequence[str], environment: str) -> str:
    """Hash of the ``environment`` and of the files that git tracks or would add below ``reads``:
    pathspecs, of which those that begin with ``:!`` exclude."""
    command = ["git", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard", "--", *reads]
    listed = subprocess.run(command, check=True, capture_output=True).stdout.split(b"\0")
    hashed = hashlib.sha256(environment.encode())
    for name in sorted({name for name in listed if name}):
        path = root / os.fsdecode(name)
        content = _digest(path.read_bytes()) if path.is_file() else "absent"
        hashed.update(name + b"\0" + content.encode())
    return hashed.hexdigest()


def find_passed(part: str, key: str) -> str | None:
    """The commit at which a part passed with this key; None if it did not."""
    found: str | None = _passed(part).get(key)
    return found


def add_passed(part: str, key: str, commit: str) -> None:
    keys = {k: c for k, c in _passed(part).items() if k != key} | {key: commit}
    newest = dict([*keys.items()][-MOST_RECORDS:])
    known = _load(folder() / "passed.json").get("passed", {})
    _write(folder() / "passed.json", {"format": FORMAT, "passed": known | {part: newest}})


def _passed(part: str) -> dict[str, str]:
    found: dict[str, str] = _load(folder() / "passed.json").get("passed", {}).get(part, {})
    return found


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


def _load(path: Path) -> dict[str, Any]:
    """What a file holds: nothing if it is absent or unreadable, since records only save time."""
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
