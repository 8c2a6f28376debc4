"""PipeMorph trainer: runs the stages of a pipeline and follows the plans of the core.

Names that are slow to import are imported when they are first used: the agent and the preflight,
which live in this package, must start fast and do not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipemorph.removed import NAMES, removal
from pipemorph_trainer.errors import (
    BatchError,
    PeerLostError,
    PipelineError,
    ShapeError,
    UnwrittenError,
    WaitTimeoutError,
)

if TYPE_CHECKING:
    from pipemorph.api.sections.trainer import Checkpoint
    from pipemorph_trainer.context import TrainerContext
    from pipemorph_trainer.executor.split.registered import register_function
    from pipemorph_trainer.executor.stages.emulated import EmulatedStage
    from pipemorph_trainer.pipeline import Pipeline
    from pipemorph_trainer.settings import Options
    from pipemorph_trainer.state.scaler import GradScaler
    from pipemorph_trainer.topology.mesh import make_mesh
    from pipemorph_trainer.topology.part import Part

__all__ = [
    "BatchError",
    "Checkpoint",
    "EmulatedStage",
    "GradScaler",
    "Options",
    "Part",
    "PeerLostError",
    "Pipeline",
    "PipelineError",
    "ShapeError",
    "TrainerContext",
    "UnwrittenError",
    "WaitTimeoutError",
    "make_mesh",
    "register_function",
]

_LATE = {
    "Checkpoint": "pipemorph.api.sections.trainer",
    "EmulatedStage": ".executor.stages.emulated",
    "GradScaler": ".state.scaler",
    "Options": ".settings",
    "Part": ".topology.part",
    "Pipeline": ".pipeline",
    "TrainerContext": ".context",
    "make_mesh": ".topology.mesh",
    "register_function": ".executor.split.registered",
}


def __getattr__(name: str) -> Any:
    if gone := removal(NAMES, name):
        # An AttributeError would lose these words in "from pipemorph_trainer import".
        raise ImportError(f"{name} {gone}", name=__name__)
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATE[name], __name__), name)
