"""Uncaught errors of a script that torchrun started: named where torchrun looks for them.

torchrun's summary shows the content of each rank's error file, which only a function with
``@record`` writes. Without it the summary says nothing, and the reason is in one of the tracebacks
of all ranks above it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from pipemorph.errors import InputError, PipeMorphError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable with the path of a rank's error file; set by torchrun alone."""


def name_uncaught_errors() -> None:
    """Write an uncaught :class:`PipeMorphError` of this rank of torchrun to its error file, and
    print an :class:`InputError` in one line: the frames above it are the trainer's own."""
    if ERROR_FILE in os.environ and not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


@dataclass(frozen=True)
class _Hook:
    """``before``: the hook that it takes the place of, such as that of a process group."""

    before: Callable[[type[BaseException], BaseException, TracebackType | None], object]

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        text = f"{kind.__name__}: {error}"
        if isinstance(error, InputError):
            print(f"rank {os.environ.get('RANK', '?')}: {text}", file=sys.stderr)
        else:
            self.before(kind, error, trace)
        if not isinstance(error, PipeMorphError):
            return
        extra = {"timestamp": str(int(time.time()))}
        content = json.dumps({"message": {"message": text, "extraInfo": extra}})
        try:
            Path(os.environ[ERROR_FILE]).write_text(content)
        except OSError as refused:
            print(f"torchrun's summary will not name this: {refused}", file=sys.stderr)
