"""Saves the state of a pipeline between two iterations: checkpoints, and copies in memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipemorph.wire import IterationSample
from pipemorph_trainer.errors import UnwrittenError
from pipemorph_trainer.state.kept.resumed import Resumed
from pipemorph_trainer.steps.parts import Parts

if TYPE_CHECKING:
    from pipemorph_trainer.state.checkpoint import Checkpoints

log = logging.getLogger("pipemorph.trainer")


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
        self._tried = self.saved
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
            parts.keeper.begin(
                iteration,
                self._unreported(),
                synchronized=self.synchronized,
                moving=moving,
            )

    def _unreported(self) -> Sequence[IterationSample]:
        """Iterations that the host may not have; on rank 0 only."""
        parts = self._parts
        return parts.iterations.reports.unreported() if parts.coordinate.rank == 0 else ()

    def save_if_due(self, iteration: int) -> None:
        """Save a checkpoint if one is due. Right before the next step, so after the optimizer's
        step."""
        checkpoints = self._parts.checkpoints
        if checkpoints is not None and self.synchronized and self._due(iteration):
            self._tried = iteration
            try:
                self.save(checkpoints, iteration)
            except UnwrittenError as error:
                self._lose(error)

    def save(self, checkpoints: Checkpoints, iteration: int) -> Path:
        """Save a checkpoint of the state before ``iteration``. Collective. Returns its folder.
        Raises as :meth:`Checkpoints.save`."""
        parts = self._parts
        self.finish_writing()
        parts.waiting.begin(f"all ranks to save the checkpoint of iteration {iteration}")
        if parts.replicas is not None:
            # Each replica writes a part of the checkpoint.
            parts.replicas.share_buffers()
        try:
            folder = checkpoints.save(iteration, self._unreported())
        finally:
            parts.waiting.end()
        self.saved = self._tried = iteration
        return folder

    def finish_writing(self, *, needed: bool = False) -> None:
        """Wait for the checkpoint that is being written, if any. ``needed``: raises
        :class:`UnwrittenError` if the disk refuses it, as nothing goes on."""
        checkpoints, waiting = self._parts.checkpoints, self._parts.waiting
        if checkpoints is not None and checkpoints.writing is not None:
            waiting.begin(f"all ranks to write {checkpoints.writing}")
            try:
                checkpoints.finish()
            except UnwrittenError as error:
                if needed:
                    raise
                self._lose(error)
            finally:
                waiting.end()

    def _lose(self, error: UnwrittenError) -> None:
        """Say that there is no such checkpoint. Training goes on."""
        if self._parts.coordinate.rank == 0:
            text = f"a checkpoint is lost, and training goes on: {error}"
            log.warning("%s", text)
            self._parts.reporter.publish(message=text, lost_checkpoint=True)

    def _due(self, iteration: int) -> bool:
        """Whether a checkpoint is due before an iteration."""
        asked = self._parts.settings.checkpoint
        return asked is not None and iteration // asked.every > self._tried // asked.every
