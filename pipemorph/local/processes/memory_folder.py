"""Folder in memory to which ranks save their state for the next generation."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipemorph.checkpoints import delete_path
from pipemorph.errors import one_line
from pipemorph.exits import drain_refusal_file_name, drain_request_file_name
from pipemorph.local.processes.locked_folder import TemporaryFolder
from pipemorph.protocol import ResumedFrom

SHARED_MEMORY = Path("/dev/shm")
LONGEST_WHY = 500
"""Longest reason of ranks, in characters."""


@dataclass(frozen=True)
class MemoryCheckpointFolder:
    """Folder of mode 0700. Call :meth:`remove` at the end of the job."""

    root: Path
    temporary: TemporaryFolder | None = None
    """The folder as made here; None if it existed before."""

    @staticmethod
    def create_folder() -> MemoryCheckpointFolder:
        """Make the folder. Raises OSError without a writable file system in memory."""
        made = TemporaryFolder("kept", SHARED_MEMORY)
        return MemoryCheckpointFolder(made.root, made)

    def read_resumed(self, generation: int) -> ResumedFrom | None:
        """State with which the ranks of a generation started; None if they reported none. Raises
        OSError if the report cannot be read."""
        try:
            found = json.loads((self.root / f"resumed.generation-{generation}").read_text())
            return ResumedFrom(
                iteration=int(found["iteration"]),
                rung=one_line(str(found["rung"]), 32),
                why=one_line(str(found["why"]), LONGEST_WHY),
            )
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def request_drain(self, generation: int, layers: Sequence[int] = ()) -> None:
        """Request that the ranks of a generation leave for another layout. ``layers``: of each
        stage; empty: as before. Raises OSError."""
        self.clear_drain_refusal(generation)
        path = self.root / drain_request_file_name(generation)
        # Ranks read the file as soon as it exists.
        unfinished = path.with_suffix(f"{path.suffix}.unfinished")
        unfinished.write_text(json.dumps(list(layers)) if layers else "")
        unfinished.rename(path)

    def withdraw_drain(self, generation: int) -> None:
        """Withdraw the request. Ranks that stay remove the file, too, if they have not failed."""
        with contextlib.suppress(OSError):
            (self.root / drain_request_file_name(generation)).unlink(missing_ok=True)

    def read_drain_refusal(self, generation: int) -> str | None:
        """Reason why the ranks of a generation do not leave as requested; None without one."""
        try:
            return one_line(
                (self.root / drain_refusal_file_name(generation)).read_text(), LONGEST_WHY
            )
        except (OSError, ValueError):
            return None

    def clear_drain_refusal(self, generation: int) -> None:
        """Remove the answer to an earlier request. Raises OSError."""
        (self.root / drain_refusal_file_name(generation)).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove the saved state. Call it when no rank is running. Raises OSError."""
        for path in self.root.iterdir():
            delete_path(path, lenient=True)

    def remove(self) -> bool:
        """Remove the folder, if it was made here. Returns True if it is gone."""
        return self.temporary is None or self.temporary.remove()
