"""The folder in memory in which ranks keep their state for the next generation."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipemorph.errors import one_line
from pipemorph.exits import leave_file, stay_file
from pipemorph.local.processes.locked import TemporaryFolder
from pipemorph.wire import ResumedFrom

SHARED_MEMORY = Path("/dev/shm")
LONGEST_WHY = 500
"""Characters of a reason that ranks give."""


@dataclass(frozen=True)
class KeptFolder:
    """A folder of mode 0700. Call :meth:`remove` at the end of the job."""

    root: Path
    made: TemporaryFolder | None = None
    """None: it was there before."""

    @staticmethod
    def make() -> KeptFolder:
        """Raises OSError if there is no file system in memory that can be written."""
        made = TemporaryFolder("kept", SHARED_MEMORY)
        return KeptFolder(made.root, made)

    def resumed(self, generation: int) -> ResumedFrom | None:
        """What the ranks of a generation have left word of; None if of nothing. Raises OSError if
        that cannot be read."""
        try:
            found = json.loads((self.root / f"resumed.generation-{generation}").read_text())
            return ResumedFrom(
                iteration=int(found["iteration"]),
                rung=one_line(str(found["rung"]), 32),
                why=one_line(str(found["why"]), LONGEST_WHY),
            )
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def ask_to_leave(self, generation: int, layers: Sequence[int] = ()) -> None:
        """Ask the ranks of a generation to leave for other places, or for parts with so many
        ``layers`` per stage. Raises OSError."""
        self.forget_stay(generation)
        path = self.root / leave_file(generation)
        # Ranks that see it read it.
        unfinished = path.with_suffix(f"{path.suffix}.unfinished")
        unfinished.write_text(json.dumps(list(layers)) if layers else "")
        unfinished.rename(path)

    def stop_asking(self, generation: int) -> None:
        """Take that back. Ranks that stay remove the file, too, but may have failed before."""
        with contextlib.suppress(OSError):
            (self.root / leave_file(generation)).unlink(missing_ok=True)

    def stay(self, generation: int) -> str | None:
        """Why the ranks of a generation do not leave, as they were asked to; None if they said
        nothing."""
        try:
            return one_line((self.root / stay_file(generation)).read_text(), LONGEST_WHY)
        except (OSError, ValueError):
            return None

    def forget_stay(self, generation: int) -> None:
        """Remove the answer to an earlier question. Raises OSError."""
        (self.root / stay_file(generation)).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove what is kept. Call it when no rank is running. Raises OSError."""
        for path in self.root.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def remove(self) -> bool:
        """Whether it is gone."""
        return self.made is None or self.made.remove()
