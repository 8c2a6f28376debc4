"""Where the state of a generation comes from, and the word that rank 0 leaves of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pipemorph.wire import IterationSample

log = logging.getLogger("pipemorph.trainer")

Rung = Literal["kept", "replica", "neighbour", "checkpoint", "beginning"]
"""Where the state of a generation comes from: the ranks' own copies in their own memory, some of
other replicas', some in the memory of another pod, a checkpoint, or nowhere."""


class Resumed(NamedTuple):
    """Where the state of this generation comes from. ``why``: why not from a newer iteration, or
    from a higher rung; empty if there was none."""

    iteration: int
    rung: Rung
    why: str = ""
    unreported: Sequence[IterationSample] = ()
    """Earlier iterations that may not have been reported."""

    @property
    def from_memory(self) -> bool:
        return self.rung in ("kept", "replica", "neighbour")

    def __str__(self) -> str:
        told = {
            "kept": f"went on with iteration {self.iteration} from its ranks' memory",
            "replica": f"went on with iteration {self.iteration} from memory of other replicas",
            "neighbour": f"went on with iteration {self.iteration} from memory of other pods",
            "checkpoint": f"resumed from the checkpoint of iteration {self.iteration}",
            "beginning": "began from the beginning",
        }[self.rung]
        return f"{told} ({self.why})" if self.why else told


class Word:
    """What rank 0 says of the state of a generation, once it has finished as many iterations as
    ``counts_from``: new parts of the model do not count before. ``folder``: None to say nothing."""

    def __init__(
        self, folder: Path | None, generation: int, resumed: Resumed, counts_from: int
    ) -> None:
        self._folder, self._generation, self._resumed = folder, generation, resumed
        self._counts_from = counts_from

    def finished(self, iterations: int) -> None:
        """Leave the word if it is due. ``iterations``: number of finished ones."""
        if iterations >= self._counts_from:
            self.leave()

    def leave(self) -> None:
        """Leave the word, unless that has been done."""
        folder, self._folder = self._folder, None
        if folder is not None:
            leave_word(folder, self._generation, self._resumed)


def leave_word(folder: Path, generation: int, resumed: Resumed) -> None:
    """Write where the state of this generation comes from, for the host:
    ``resumed.generation-<G>``, JSON. In place of those of earlier generations: it takes memory."""
    path = folder / f"resumed.generation-{generation}"
    unfinished = path.with_suffix(".unfinished")
    try:
        unfinished.write_text(json.dumps(resumed._replace(unreported=())._asdict()))
        unfinished.rename(path)
        for earlier in folder.glob("resumed.generation-*"):
            if earlier != path:
                earlier.unlink()
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error.strerror)
