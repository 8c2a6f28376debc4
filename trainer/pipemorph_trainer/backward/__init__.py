"""Split backward: B (gradient for the input) and W (gradients for the weights).

:class:`~pipemorph_trainer.executor.module_runner.ModuleRunner` uses it. See
``docs/split-backward.md``.
"""

from pipemorph_trainer.backward.split_report import Mode, OpOrderError, Split, SplitReport
from pipemorph_trainer.errors import SplitError

__all__ = ["Mode", "OpOrderError", "Split", "SplitError", "SplitReport"]
