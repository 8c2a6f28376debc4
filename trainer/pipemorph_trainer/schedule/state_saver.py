"""State of a pipeline, saved between two iterations: checkpoints, and copies in memory."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipemorph.protocol import IterationSample
from pipemorph_trainer.checkpoint.memory.resume_point import ResumePoint
from pipemorph_trainer.errors import UnwrittenError
from pipemorph_trainer.schedule.pipeline_builder import PipelineComponents

if TYPE_CHECKING:
    from pipemorph_trainer.checkpoint.disk import DiskCheckpointer

log = logging.getLogger("pipemorph.trainer")


class StateSaver:
    """Saver of the state, when that is due. Main thread only.

    ``resumed``: the state with which this rank began.
    """

    def __init__(self, parts: PipelineComponents, resumed: ResumePoint) -> None:
        self._parts = parts
        self.saved = resumed.iteration
        """Newest iteration whose checkpoint is saved, or need not be."""
        if resumed.from_memory and resumed.iteration > 0:
            # If a checkpoint of this iteration is due, it may not have been finished.
            self.saved -= 1
        self._tried = self.saved
        self.synchronized = True
        """True if the gradients of the last step were averaged over replicas."""

    def mark_batch_position(
        self, iteration: int, *, leaving: bool = False, moving: bool = False
    ) -> None:
        """Mark that the batch of the next iteration has not been drawn yet. ``leaving``,
        ``moving``: all ranks save before it and end, or leave for another layout."""
        keeper, extra = self._parts.memory_checkpointer, self._parts.extra
        if keeper is not None and keeper.mark_iteration_end(iteration, moving=moving):
            return
        if leaving or self._is_due(iteration):
            extra.capture_batch_state()
        else:
            extra.discard_batch_state()

    def copy_state(self, iteration: int, *, moving: bool = False) -> None:
        """Copy the state before the next iteration. Call it before the last iteration is reported,
        so that no reported iteration is repeated."""
        parts = self._parts
        if parts.memory_checkpointer is not None:
            parts.memory_checkpointer.copy_before_iteration(
                iteration,
                self._list_unreported(),
                synchronized=self.synchronized,
                moving=moving,
            )

    def _list_unreported(self) -> Sequence[IterationSample]:
        """Return the iterations that the host may not have; on rank 0 only."""
        parts = self._parts
        return parts.iterations.reports.list_unreported() if parts.coordinate.rank == 0 else ()

    def save_if_due(self, iteration: int) -> None:
        """Save a checkpoint if one is due. Called right before the next step, so after the
        optimizer's step."""
        checkpoints = self._parts.checkpoints
        if checkpoints is not None and self.synchronized and self._is_due(iteration):
            self._tried = iteration
            try:
                self.save_checkpoint(checkpoints, iteration)
            except UnwrittenError as error:
                self._report_lost_checkpoint(error)

    def save_checkpoint(self, checkpoints: DiskCheckpointer, iteration: int) -> Path:
        """Save a checkpoint of the state before ``iteration``. Collective. Returns its folder.
        Raises the errors of :meth:`DiskCheckpointer.save`."""
        parts = self._parts
        self.finish_writing()
        parts.waiting.begin_wait(f"all ranks to save the checkpoint of iteration {iteration}")
        if parts.replicas is not None:
            # Each replica writes a part of the checkpoint.
            parts.replicas.share_buffers()
        try:
            folder = checkpoints.save(iteration, self._list_unreported())
        finally:
            parts.waiting.end_wait()
        self.saved = self._tried = iteration
        return folder

    def finish_writing(self, *, needed: bool = False) -> None:
        """Wait for the checkpoint that is being written, if any. ``needed``: raise
        :class:`UnwrittenError` if the disk refuses it, since training ends."""
        checkpoints, waiting = self._parts.checkpoints, self._parts.waiting
        if checkpoints is not None and checkpoints.folder_being_written is not None:
            waiting.begin_wait(f"all ranks to write {checkpoints.folder_being_written}")
            try:
                checkpoints.finish_writing()
            except UnwrittenError as error:
                if needed:
                    raise
                self._report_lost_checkpoint(error)
            finally:
                waiting.end_wait()

    def _report_lost_checkpoint(self, error: UnwrittenError) -> None:
        """Report a checkpoint that is lost. Training goes on."""
        if self._parts.coordinate.rank == 0:
            text = f"a checkpoint is lost, and training goes on: {error}"
            log.warning("%s", text)
            self._parts.reporter.publish(message=text, lost_checkpoint=True)

    def _is_due(self, iteration: int) -> bool:
        """True if a checkpoint is due before an iteration."""
        wanted = self._parts.settings.checkpoint
        return wanted is not None and iteration // wanted.every > self._tried // wanted.every
