"""Ends a pipeline: after its last iteration, after an error, and between two iterations when one of
its ranks was asked to end."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, NoReturn

from pipemorph.api.layout import Layout
from pipemorph.errors import PipeMorphError
from pipemorph.exits import EXIT_MOVES, EXIT_SAVED, PARTS_STAY, leave_file, stay_file
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.errors import BatchError, PipelineError, UnwrittenError
from pipemorph_trainer.signals import LastWord
from pipemorph_trainer.steps.parts import Parts
from pipemorph_trainer.steps.saving import Saving

log = logging.getLogger("pipemorph.trainer")


class Departure(NamedTuple):
    """How all ranks end: what rank 0 says, and the exit code of each."""

    text: str
    code: int


class Leaving:
    """Knows whether all ranks are to end, and prepares for it. Main thread only.

    A rank is asked by SIGTERM to save and to end, or by a file of its host to leave: for another
    layout, which is another place or another part, or since a replica joins. All ranks hear of it
    with the loss of an iteration.

    ``describe``: what this rank is waiting for; ``last``: called before a signal ends the process.
    """

    def __init__(
        self,
        parts: Parts,
        saving: Saving,
        context: TrainerContext,
        *,
        describe: Callable[[], str],
        last: Callable[[], None],
    ) -> None:
        self._parts, self._saving, self._context = parts, saving, context
        saves = parts.checkpoints is not None
        self._last_word = LastWord(describe, last, context.grace_seconds if saves else 0.0)
        kept, generation = context.kept_dir, context.generation
        self._leave = None if kept is None else kept / leave_file(generation)
        parts.iterations.ask(
            (lambda: self._last_word.asked) if saves else None,
            None if self._leave is None else self._leave.exists,
        )
        self.ending = False
        """Whether all ranks save before the next iteration and end."""
        self.moving = False
        """Whether all ranks leave for another layout before the next iteration."""

    def install(self) -> None:
        """Handle signals from now on."""
        self._last_word.install()

    def remove(self) -> None:
        """No longer handle signals. Idempotent."""
        self._last_word.remove()

    def hear(self) -> None:
        """Take over what all ranks have heard in the iteration that has ended. Between the steps of
        an accumulation none of them leaves."""
        iterations, may = self._parts.iterations, self._saving.synchronized
        self.ending = iterations.leaving and may
        self.moving = iterations.moving and may

    def saved_to_end(self, iteration: int) -> Departure | None:
        """If all ranks are to end, save before the iteration that they do not begin, unless its
        checkpoint is saved. None if they are not, or have done all iterations."""
        if not self.ending or self._complete(iteration):
            return None
        checkpoints = self._parts.checkpoints
        assert checkpoints is not None, "only a rank that can save waits for it after a SIGTERM"
        if self._saving.saved != iteration:
            self._saving.save(checkpoints, iteration)
        self._saving.finish_writing(needed=True)
        self._last_word.saved = True
        return Departure(
            f"saved the checkpoint of iteration {iteration}, since a rank was asked to end",
            EXIT_SAVED,
        )

    def sealed_to_move(self, iteration: int) -> Departure | None:
        """If all ranks are to leave for another layout, see that each has a copy of its state. None
        if they are not; also if one of them has no copy, or if they are to have other parts and
        cannot: then all go on, and rank 0 says so."""
        if not self.moving or self._complete(iteration):
            return None
        world = self._parts.world
        # Each pod has a host, and some may not have asked yet.
        layers = max(world.tell_all(self._asked_layers(), int))
        if layers and (why := self._parts.why_fixed(layers)):
            self._stay(f"{PARTS_STAY}{why}")
            return None
        keeper = self._parts.keeper
        job = self._context.job
        # A replica that joins has nothing of its own.
        exact = job is None or job.spec.parallelism.min_replicas is None
        why = "it keeps no state" if keeper is None else keeper.seal(iteration, exact=exact)
        lacks = [f"rank {r}: {w}" for r, w in enumerate(world.tell_all(why, str)) if w]
        if lacks:
            self._stay(lacks[0])
            return None
        where = "with other layers" if layers else "for other places"
        if not exact:
            where = "so that a replica can join"
        return Departure(f"left at iteration {iteration}, {where}", EXIT_MOVES)

    def _asked_layers(self) -> int:
        """How many layers the host has spread anew; 0 if each stage is to hold what it holds."""
        if self._leave is None:
            return 0
        try:
            asked = tuple(json.loads(self._leave.read_text() or "[]"))
        except FileNotFoundError:
            # Another pod's host has asked. Or it has taken it back: a rank has failed.
            return 0
        mesh, total = self._parts.coordinate.mesh, sum(asked)
        here = Layout.first(mesh).with_layers(self._context.split(mesh.stages))
        return 0 if asked == here.spread(total) else total

    def _stay(self, why: str) -> None:
        """Say why the ranks do not leave, after all."""
        context, folder = self._context, self._context.kept_dir
        if folder is not None:
            if self._parts.coordinate.rank == 0:
                log.warning("ranks go on as they are: %s", why)
                (folder / stay_file(context.generation)).write_text(why)
            # Pods have one each.
            (folder / leave_file(context.generation)).unlink(missing_ok=True)

    def _complete(self, iteration: int) -> bool:
        """Whether all iterations of the manifest are done."""
        wanted = self._context.iterations
        return 0 < wanted <= iteration


class Ending:
    """Whether and why a pipeline has ended. ``release``: takes it down, ``goodbye`` if its end is
    normal. Main thread only, but for :attr:`failure`."""

    def __init__(self, parts: Parts, release: Callable[[bool], None]) -> None:
        self._parts, self._release = parts, release
        self._process = os.getpid()
        self.closed = False
        self.failure: str | None = None
        """The error that has ended it, as text."""

    @property
    def forked(self) -> bool:
        """Whether this is a forked child of the process that made the pipeline. It must not close
        the parent's connections when it leaves the ``with`` block."""
        return os.getpid() != self._process

    def check_open(self, call: str) -> None:
        """Raise :class:`PipelineError` if the pipeline has ended before this ``call``."""
        if self.closed:
            raise PipelineError(f"{self._parts.coordinate}: {call}() after close()")

    def close(self, state: Literal["finished", "failed"], message: str | None) -> None:
        """End normally: tell the agent in which state, and say goodbye to the neighbours."""
        self.closed = True
        reporter = self._parts.reporter
        reporter.state = state
        reporter.publish(message=message)
        self._release(True)

    def leave(self, departure: Departure) -> NoReturn:
        """End this rank, as all do. Raises :class:`SystemExit`, so that the script's ``finally``
        and ``with`` run."""
        self.closed = True
        if self._parts.coordinate.rank == 0:
            print(departure.text, file=sys.stderr, flush=True)
        self._parts.reporter.publish(message=departure.text)
        self._release(True)
        raise SystemExit(departure.code)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Context of everything that waits for other ranks: an error ends the pipeline, unless it
        only refuses a batch or a checkpoint."""
        try:
            yield
        except (BatchError, UnwrittenError):
            raise
        except Exception as error:
            told = self._parts.failures.behind(error)
            self.fail(told or error)
            if told is None:
                raise
            raise told from error
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Release everything after an error, without waiting: peers see the control socket
        close. Idempotent."""
        if self.closed or self.forked:
            return
        self.closed = True
        parts = self._parts
        parts.reporter.state = "failed"
        text = str(error) if isinstance(error, PipeMorphError) else repr(error)
        if not text.startswith(str(parts.coordinate)):
            text = f"{parts.coordinate}: {text}"
        # Shown if SIGTERM arrives before the interpreter has printed the error.
        self.failure = text
        # First, so that who sees a connection end finds the reason.
        parts.failures.tell(error)
        try:
            parts.reporter.publish(message=text)
        finally:
            self._release(False)
