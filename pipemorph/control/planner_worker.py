"""Functions that run in a planner's worker process: its initializer, and the wrapper of each call.

The worker imports this module and the planner, but no module of its host, such as the ingest.
"""

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
import pipemorph.control.decide.layouts.layout_changes
import pipemorph.control.decide.plan_choice  # noqa: F401
from pipemorph.errors import InputError

Argument = TypeVar("Argument")
Result = TypeVar("Result")

WORKER_NICENESS = 5
"""Niceness that is added to workers: the event loop, which answers reports, goes first."""

log = logging.getLogger("pipemorph.planner")


def prepare_worker() -> None:
    """Initialize a worker: lower its priority, ignore SIGINT, and end it when its host dies."""
    os.nice(WORKER_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The host ends its workers.
    gc.freeze()  # Imported modules are no garbage, and take long to scan.
    threading.Thread(target=_exit_with_host, daemon=True).start()


def _exit_with_host() -> None:
    """Exit when the host has died: an executor's worker would wait forever."""
    host = multiprocessing.parent_process()
    assert host is not None
    host.join()
    os._exit(1)


def call_for_host(function: Callable[[Argument], Result], argument: Argument) -> Result:
    """Call a function. Other exceptions than :class:`InputError` are logged and become one, since
    the host must be able to unpickle them."""
    try:
        return function(argument)
    except InputError:
        raise
    except Exception as error:
        log.exception("a plan could not be made")
        raise InputError(f"the planner failed: {type(error).__name__}: {error}") from None
