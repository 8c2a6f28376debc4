"""End of a pipeline: after its last iteration, after an error, and between two iterations on a
request to one of its ranks."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, NoReturn

from pipemorph.errors import PipeMorphError
from pipemorph.exits import (
    EXIT_DRAINED,
    EXIT_SAVED,
    LAYERS_FIXED_PREFIX,
    drain_refusal_file_name,
    drain_request_file_name,
)
from pipemorph.spec.layout import Layout
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.errors import BatchError, PipelineError, UnwrittenError
from pipemorph_trainer.schedule.pipeline_builder import PipelineComponents
from pipemorph_trainer.schedule.state_saver import StateSaver
from pipemorph_trainer.signals import SigtermHandler

log = logging.getLogger("pipemorph.trainer")


class PlannedExit(NamedTuple):
    """Planned end of all ranks: the text that rank 0 prints, and the exit code of each."""

    text: str
    code: int


class GracefulShutdown:
    """Shutdown on request: detects that all ranks shall end, and prepares for it. Main thread only.

    SIGTERM requests that a rank saves and ends. A file of its host requests that it leaves for
    another layout: another place, other layers, or one more replica. The loss of an iteration
    carries the request to all ranks.

    ``describe``: describes the current wait; ``last``: called before a signal ends the process.
    """

    def __init__(
        self,
        parts: PipelineComponents,
        saving: StateSaver,
        context: TrainerContext,
        *,
        describe: Callable[[], str],
        last: Callable[[], None],
    ) -> None:
        self._parts, self._saving, self._context = parts, saving, context
        saves = parts.checkpoints is not None
        self._last_word = SigtermHandler(describe, last, context.grace_seconds if saves else 0.0)
        folder, generation = context.memory_dir, context.generation
        self._leave = None if folder is None else folder / drain_request_file_name(generation)
        parts.iterations.set_request_sources(
            (lambda: self._last_word.save_requested) if saves else None,
            None if self._leave is None else self._leave.exists,
        )
        self.ending = False
        """True if all ranks save before the next iteration and end."""
        self.changing_layout = False
        """True if all ranks leave for another layout before the next iteration."""

    def install_handlers(self) -> None:
        """Handle signals from now on."""
        self._last_word.install()

    def remove_handlers(self) -> None:
        """Stop handling signals. Idempotent."""
        self._last_word.uninstall()

    def update_requests(self) -> None:
        """Adopt the requests that all ranks received with the last loss. No rank leaves between the
        steps of an accumulation."""
        iterations, may = self._parts.iterations, self._saving.synchronized
        self.ending = iterations.is_ending and may
        self.changing_layout = iterations.is_changing_layout and may

    def save_before_end(self, iteration: int) -> PlannedExit | None:
        """Save a checkpoint of ``iteration``, unless it is saved, if all ranks shall end before it.
        Returns their end; None if they go on, or have finished all iterations."""
        if not self.ending or self._is_job_complete(iteration):
            return None
        checkpoints = self._parts.checkpoints
        assert checkpoints is not None, "only a rank that can save waits for it after a SIGTERM"
        if self._saving.saved != iteration:
            self._saving.save_checkpoint(checkpoints, iteration)
        self._saving.finish_writing(needed=True)
        self._last_word.saved = True
        return PlannedExit(
            f"saved the checkpoint of iteration {iteration}: a rank had a request to end",
            EXIT_SAVED,
        )

    def seal_before_layout_change(self, iteration: int) -> PlannedExit | None:
        """Seal each rank's copy of its state if all ranks shall leave for another layout. Returns
        their end; None if they go on. They also go on, and rank 0 reports it, if a rank has no
        copy, or if they shall hold other layers and cannot."""
        if not self.changing_layout or self._is_job_complete(iteration):
            return None
        world = self._parts.world
        # Each pod has a host, and some may not have written their request yet.
        layers = max(world.gather_all(self._count_moved_layers(), int))
        if layers and (why := self._parts.find_move_obstacle(layers)):
            self._decline_layout_change(f"{LAYERS_FIXED_PREFIX}{why}")
            return None
        keeper = self._parts.memory_checkpointer
        job = self._context.job
        # A replica that joins has no state of its own.
        exact = job is None or job.spec.parallelism.min_replicas is None
        why = (
            "it copies no state"
            if keeper is None
            else keeper.seal_for_layout(iteration, exact=exact)
        )
        lacks = [f"rank {r}: {w}" for r, w in enumerate(world.gather_all(why, str)) if w]
        if lacks:
            self._decline_layout_change(lacks[0])
            return None
        where = "with other layers" if layers else "for other places"
        if not exact:
            where = "so that a replica can join"
        return PlannedExit(f"stopped before iteration {iteration}, {where}", EXIT_DRAINED)

    def _count_moved_layers(self) -> int:
        """Return the number of layers that the host has distributed anew; 0: each stage as now."""
        if self._leave is None:
            return 0
        try:
            layers = tuple(json.loads(self._leave.read_text() or "[]"))
        except FileNotFoundError:
            # The request is from another pod's host, or was withdrawn since a rank has failed.
            return 0
        mesh, total = self._parts.coordinate.mesh, sum(layers)
        here = Layout.build_first(mesh).with_layers(self._context.read_layer_split(mesh.stages))
        return 0 if layers == here.spread_layers(total) else total

    def _decline_layout_change(self, why: str) -> None:
        """Report why the ranks do not leave."""
        context, folder = self._context, self._context.memory_dir
        if folder is not None:
            if self._parts.coordinate.rank == 0:
                log.warning("the layout does not change: %s", why)
                (folder / drain_refusal_file_name(context.generation)).write_text(why)
            # Each pod has its own.
            (folder / drain_request_file_name(context.generation)).unlink(missing_ok=True)

    def _is_job_complete(self, iteration: int) -> bool:
        """True if all iterations of the manifest are finished."""
        wanted = self._context.iterations
        return 0 < wanted <= iteration


class PipelineTeardown:
    """End of a pipeline, and its reason. ``release``: releases everything; its argument is True if
    the end is normal. Main thread only, except :attr:`failure`."""

    def __init__(self, parts: PipelineComponents, release: Callable[[bool], None]) -> None:
        self._parts, self._release = parts, release
        self._process = os.getpid()
        self.closed = False
        self.failure: str | None = None
        """Error that ended the pipeline, as text."""

    @property
    def is_forked(self) -> bool:
        """True in a forked child of the process that made the pipeline. It must not close the
        parent's connections at the end of the ``with`` block."""
        return os.getpid() != self._process

    def check_open(self, call: str) -> None:
        """Raise :class:`PipelineError` if the pipeline has ended before this ``call``."""
        if self.closed:
            raise PipelineError(f"{self._parts.coordinate}: {call}() after close()")

    def close(self, state: Literal["finished", "failed"], message: str | None) -> None:
        """End normally: report ``state`` to the agent, and send a goodbye to the neighbours."""
        self.closed = True
        reporter = self._parts.reporter
        reporter.state = state
        reporter.publish(message=message)
        self._release(True)

    def exit_as_planned(self, departure: PlannedExit) -> NoReturn:
        """End this rank like all others. Raises :class:`SystemExit`, so that the script's
        ``finally`` and ``with`` run."""
        self.closed = True
        if self._parts.coordinate.rank == 0:
            print(departure.text, file=sys.stderr, flush=True)
        self._parts.reporter.publish(message=departure.text)
        self._release(True)
        raise SystemExit(departure.code)

    @contextmanager
    def fail_on_error(self) -> Iterator[None]:
        """Context of all code that waits for other ranks: an error ends the pipeline, unless it
        only refuses a batch or a checkpoint."""
        try:
            yield
        except (BatchError, UnwrittenError):
            raise
        except Exception as error:
            remote = self._parts.failures.find_cause(error)
            self.fail_pipeline(remote or error)
            if remote is None:
                raise
            raise remote from error
        except BaseException as error:
            self.fail_pipeline(error)
            raise

    def fail_pipeline(self, error: BaseException) -> None:
        """Release everything after an error, without waiting: peers see the control socket
        close. Idempotent."""
        if self.closed or self.is_forked:
            return
        self.closed = True
        parts = self._parts
        parts.reporter.state = "failed"
        text = str(error) if isinstance(error, PipeMorphError) else repr(error)
        if not text.startswith(str(parts.coordinate)):
            text = f"{parts.coordinate}: {text}"
        # Shown if SIGTERM arrives before the interpreter has printed the error.
        self.failure = text
        # First, so that a rank that sees a connection end finds the reason.
        parts.failures.report_failure(error)
        try:
            parts.reporter.publish(message=text)
        finally:
            self._release(False)
