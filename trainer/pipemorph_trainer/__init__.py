"""PipeMorph trainer: runs the stages of a pipeline and follows the plans of the core.

Names are imported when they are first used, so that the agent, which lives in this package
and must start fast, does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipemorph_trainer.context import TrainerContext
    from pipemorph_trainer.errors import (
        PeerLostError,
        PipelineError,
        ShapeError,
        WaitTimeoutError,
    )
    from pipemorph_trainer.executor.stages.emulated import EmulatedStage
    from pipemorph_trainer.pipeline import Pipeline

__all__ = [
    "EmulatedStage",
    "PeerLostError",
    "Pipeline",
    "PipelineError",
    "ShapeError",
    "TrainerContext",
    "WaitTimeoutError",
]

_HOMES = {
    "EmulatedStage": "executor.stages.emulated",
    "PeerLostError": "errors",
    "Pipeline": "pipeline",
    "PipelineError": "errors",
    "ShapeError": "errors",
    "TrainerContext": "context",
    "WaitTimeoutError": "errors",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
