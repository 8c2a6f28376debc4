"""Split backward: B (gradient for the input) and W (gradients for the weights).

:class:`ModuleRunner` is the entry point. See ``docs/split-backward.md``.
"""

from pipemorph_trainer.backward.split_report import Mode, OpOrderError, Split, SplitReport
from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.module_runner import ModuleRunner

__all__ = ["Mode", "ModuleRunner", "OpOrderError", "Split", "SplitError", "SplitReport"]
