"""The split backward: B (gradient for the input) and W (gradients for the weights).

:class:`StageRunner` is the entry. See ``docs/split-backward.md``.
"""

from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.split.report import (
    Attempt,
    Mode,
    OffloadAttempt,
    OpTimes,
    OrderError,
    Split,
    SplitReport,
)
from pipemorph_trainer.executor.split.runner import StageRunner
from pipemorph_trainer.executor.split.trial import Sample

__all__ = [
    "Attempt",
    "Mode",
    "OffloadAttempt",
    "OpTimes",
    "OrderError",
    "Sample",
    "Split",
    "SplitError",
    "SplitReport",
    "StageRunner",
]
