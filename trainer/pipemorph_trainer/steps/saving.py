"""Saves the state of a pipeline between two iterations: checkpoints, and copies in memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipemorph_trainer.state.kept.resumed import Resumed
from pipemorph_trainer.steps.parts import Parts

if TYPE_CHECKING:
    from pipemorph_trainer.state.checkpoint import Checkpoints


class Saving:
    """Knows when the state is to be saved, and saves it. Main thread only.

    ``resumed``: with which state this rank began.
    """

    def __init__(self, parts: Parts, resumed: Resumed) -> None:
        self._parts = parts
        self.saved = resumed.iteration
        """The newest iteration before which a checkpoint was saved, or need not be."""
        if resumed.from_memory and resumed.iteration > 0:
            # If a checkpoint of this iteration is due, it may not have been finished.
            self.saved -= 1
        self.synchronized = True
        """Whether the gradients of the last step were averaged over replicas."""

    def mark(self, iteration: int, *, leaving: bool = False, moving: bool = False) -> None:
        """Say that the batch of the next iteration has not been drawn yet. ``leaving``, ``moving``:
        all ranks save before it and end, or leave for other places."""
        keeper, extra = self._parts.keeper, self._parts.extra
        if keeper is not None and keeper.mark(iteration, moving=moving):
            return
        if leaving or self._due(iteration):
            extra.mark()
        else:
            extra.unmark()

    def keep(self, iteration: int, *, moving: bool = False) -> None:
        """Copy the state before the next iteration. Before anybody is told that the last one is
        over, so that no iteration that has been reported is repeated."""
        parts = self._parts
        if parts.keeper is not None:
            tells = parts.coordinate.rank == 0
            parts.keeper.begin(
                iteration,
                parts.iterations.reports.unreported() if tells else (),
                synchronized=self.synchronized,
                moving=moving,
            )

    def save_if_due(self, iteration: int) -> None:
        """Save a checkpoint if one is due. Right before the next step, so after the optimizer's
        step."""
        checkpoints = self._parts.checkpoints
        if checkpoints is not None and self.synchronized and self._due(iteration):
            self.save(checkpoints, iteration)

    def save(self, checkpoints: Checkpoints, iteration: int) -> Path:
        """Save a checkpoint of the state before ``iteration``. Collective. Returns its folder."""
        parts = self._parts
        self.finish_writing()
        self.saved = iteration
        parts.waiting.begin(f"all ranks to save the checkpoint of iteration {iteration}")
        if parts.replicas is not None:
            # Each replica writes a part of the checkpoint.
            parts.replicas.share_buffers()
        folder = checkpoints.save(iteration)
        parts.waiting.end()
        return folder

    def finish_writing(self) -> None:
        """Wait for the checkpoint that is being written, if any."""
        checkpoints, waiting = self._parts.checkpoints, self._parts.waiting
        if checkpoints is not None and checkpoints.writing is not None:
            waiting.begin(f"all ranks to write {checkpoints.writing}")
            checkpoints.finish()
            waiting.end()

    def _due(self, iteration: int) -> bool:
        """Whether a checkpoint is due before an iteration."""
        asked = self._parts.settings.checkpoint
        return asked is not None and iteration // asked.every > self.saved // asked.every
