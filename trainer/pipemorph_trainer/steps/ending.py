"""Ends a pipeline: after its last iteration, when all ranks leave, and after an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NoReturn

from pipemorph.errors import PipeMorphError
from pipemorph_trainer.errors import BatchError, PipelineError, UnwrittenError
from pipemorph_trainer.steps.leaving import Departure
from pipemorph_trainer.steps.parts import Parts


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
