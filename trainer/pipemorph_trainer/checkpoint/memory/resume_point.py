"""Source of a generation's state, and the report about it that rank 0 writes for the host."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from pipemorph.protocol import IterationSample

log = logging.getLogger("pipemorph.trainer")

ResumeSource = Literal["kept", "replica", "neighbour", "checkpoint", "beginning"]
"""Source of a generation's state: the ranks' own copies in their own memory; for some ranks copies
of other replicas, or copies in the memory of another pod; a checkpoint; or none."""


class ResumePoint(NamedTuple):
    """Iteration that this generation resumes, and the source of its state. ``why``: why neither a
    newer iteration nor a better source was possible; empty if there was none."""

    iteration: int
    rung: ResumeSource
    why: str = ""
    unreported: Sequence[IterationSample] = ()
    """Earlier iterations that may not have been reported."""

    @property
    def from_memory(self) -> bool:
        return self.rung in ("kept", "replica", "neighbour")

    def __str__(self) -> str:
        text = {
            "kept": f"resumed iteration {self.iteration} from the memory of its ranks",
            "replica": f"resumed iteration {self.iteration} from the memory of other replicas",
            "neighbour": f"resumed iteration {self.iteration} from the memory of other pods",
            "checkpoint": f"resumed iteration {self.iteration} from a checkpoint",
            "beginning": "started from the beginning",
        }[self.rung]
        return f"{text} ({self.why})" if self.why else text


class ResumeReport:
    """Report of rank 0 about a generation's state, written once ``counts_from`` iterations are
    finished, since a new split of the layers is on trial before. ``folder``: None: no report."""

    def __init__(
        self, folder: Path | None, generation: int, resumed: ResumePoint, counts_from: int
    ) -> None:
        self._folder, self._generation, self._resumed = folder, generation, resumed
        self._counts_from = counts_from

    def report_if_due(self, iterations: int) -> None:
        """Write the report if it is due. ``iterations``: number of finished iterations."""
        if iterations >= self._counts_from:
            self.write_once()

    def write_once(self) -> None:
        """Write the report, once."""
        folder, self._folder = self._folder, None
        if folder is not None:
            write_resume_report(folder, self._generation, self._resumed)


def write_resume_report(folder: Path, generation: int, resumed: ResumePoint) -> None:
    """Write the source of this generation's state for the host: ``resumed.generation-<G>``, JSON.
    Deletes the files of earlier generations, since they take memory."""
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
