"""``python -m pipemorph.control.planner_worker``: a worker process of the planner pool.

Reads pickled pairs of a function and its argument from standard input. Writes pickled pairs to
standard output: the pickled result, and the processor time that it took in seconds. Each pair is
preceded by its length in 8 bytes. Exits at the end of its input.
Host and worker are the same version of the same program, connected by a pipe.
"""

from __future__ import annotations

import gc
import logging
import pickle
import signal
import sys
import time
from collections.abc import Callable
from typing import BinaryIO, TypeVar

# Imported now, and not with the first decision.
import pipemorph.control.decide.layouts.moves
import pipemorph.control.decide.replan  # noqa: F401
from pipemorph.errors import InputError
from pipemorph.log_level import log_level

Asked = TypeVar("Asked")
Found = TypeVar("Found")

HEADER_BYTES = 8

log = logging.getLogger("pipemorph.planner")


def frame(value: object) -> bytes:
    """A pickled value, preceded by its length."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(HEADER_BYTES, "big") + data


def answer(function: Callable[[Asked], Found], asked: Asked) -> Found | InputError:
    """The function's result. Any exception becomes an :class:`InputError`: there is no plan."""
    try:
        return function(asked)
    except InputError as error:
        return error
    except Exception as error:
        log.exception("a plan could not be made")
        return InputError(f"the planner failed: {type(error).__name__}: {error}")


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the end of input."""
    # Garbage is collected between answers, and what is imported is no garbage: a tenth of a large
    # decision was the collector's.
    gc.freeze()
    gc.disable()
    while len(header := questions.read(HEADER_BYTES)) == HEADER_BYTES:
        began = time.process_time()
        function, asked = pickle.loads(questions.read(int.from_bytes(header, "big")))
        found = pickle.dumps(answer(function, asked), protocol=pickle.HIGHEST_PROTOCOL)
        answers.write(frame((found, time.process_time() - began)))
        answers.flush()
        del asked, found
        gc.collect()


def main() -> None:
    logging.basicConfig(
        level=log_level(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # Ignore interrupts: the host stops the worker by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
