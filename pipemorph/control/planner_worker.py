"""Functions that run in a worker process of the planner, which imports nothing of its host."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from typing import TypeVar

# Imported when the process starts, and not with its first decision.
import pipemorph.control.decide.layouts.moves
import pipemorph.control.decide.replan  # noqa: F401
from pipemorph.errors import InputError

Argument = TypeVar("Argument")
Result = TypeVar("Result")

NICE = 5
"""Added to the niceness of workers: the event loop, which answers reports, goes first."""

log = logging.getLogger("pipemorph.planner")


def begin() -> None:
    """Prepare this process."""
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The host ends its workers.
    gc.freeze()  # Imported modules are no garbage, and take long to scan.
    threading.Thread(target=_end_with_host, daemon=True).start()


def _end_with_host() -> None:
    """Exit when the host has died: an executor's worker would wait for work forever."""
    host = multiprocessing.parent_process()
    assert host is not None
    host.join()
    os._exit(1)


def call(function: Callable[[Argument], Result], argument: Argument) -> Result:
    """The function's result. Any exception becomes an :class:`InputError`, which can be pickled."""
    try:
        return function(argument)
    except InputError:
        raise
    except Exception as error:
        log.exception("a plan could not be made")
        raise InputError(f"the planner failed: {type(error).__name__}: {error}") from None
