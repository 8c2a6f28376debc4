"""The split backward: B (gradient for the input) and W (gradients for the weights).

:class:`StageRunner` is the entry. See ``docs/split-backward.md``.
"""

from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.split.report import Mode, OrderError, Split, SplitReport
from pipemorph_trainer.executor.split.runner import StageRunner

__all__ = ["Mode", "OrderError", "Split", "SplitError", "SplitReport", "StageRunner"]
