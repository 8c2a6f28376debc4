"""The folder for the results of a run.

A folder with results of an earlier run is rejected, unless ``--force`` is given; then only the
files of that run are deleted. Other files are never touched.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipemorph.errors import InputError

OUTPUTS = ("report.json", "timeline.json", "timeline.png", "logs", "trace")


@dataclass(frozen=True)
class OutFolder:
    """Paths of everything a run writes."""

    root: Path

    @staticmethod
    def claim(root: Path, *, force: bool) -> OutFolder:
        """Prepare ``root`` for a run. Raises :class:`InputError` if it has an earlier run and not
        ``force``, or if it cannot be written."""
        try:
            held = [name for name in OUTPUTS if (root / name).exists()]
        except OSError as error:
            raise InputError(f"--out {shown(root)} cannot be used: {error.strerror}") from None
        if held and not force:
            raise InputError(
                f"--out {root} holds an earlier run ({', '.join(held)}); choose another folder, "
                f"or replace that run with --force"
            )
        folder = OutFolder(root)
        try:
            for name in held:
                _remove(root / name)
            folder.logs.mkdir(parents=True)
            folder.trace.mkdir()
        except OSError as error:
            with contextlib.suppress(OSError):
                folder.logs.rmdir()
            where = f" ({error.filename})" if error.filename else ""
            raise InputError(
                f"--out {shown(root)} cannot be used: {error.strerror}{where}"
            ) from None
        return folder

    @property
    def report(self) -> Path:
        return self.root / "report.json"

    @property
    def timeline(self) -> Path:
        return self.root / "timeline.json"

    @property
    def picture(self) -> Path:
        return self.root / "timeline.png"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def trace(self) -> Path:
        return self.root / "trace"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"


def shown(path: Path) -> str:
    """A path, shortened to fit on one line."""
    text = str(path)
    return text if len(text) <= 200 else text[:199] + "…"


def write_json(path: Path, content: Any, *, indent: int | None = None) -> None:
    """Replace ``path`` atomically, so that readers never see partial content."""
    write_whole(path, (json.dumps(content, indent=indent) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Replace ``path`` atomically: complete or unchanged. Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
