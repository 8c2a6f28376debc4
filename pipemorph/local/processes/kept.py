"""The folder in memory in which ranks leave their state for the next generation."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_WHOLE = re.compile(r"rank-\d+\.generation-\d+")
"""Names that ranks give to what they have written completely."""


@dataclass(frozen=True)
class KeptFolder:
    """A folder of mode 0700. Call :meth:`remove` at the end of the job."""

    root: Path

    @staticmethod
    def make() -> KeptFolder:
        """Raises OSError if there is no file system in memory that can be written."""
        return KeptFolder(Path(tempfile.mkdtemp(prefix="pipemorph-kept-", dir=SHARED_MEMORY)))

    def tidy(self) -> None:
        """Remove what ranks that were killed have begun to write. Call it when none is running."""
        self._remove(lambda name: _WHOLE.fullmatch(name) is None)

    def clear(self) -> None:
        self._remove(lambda name: True)

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def _remove(self, which: Callable[[str], bool]) -> None:
        for path in self.root.iterdir():
            if not which(path.name):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
