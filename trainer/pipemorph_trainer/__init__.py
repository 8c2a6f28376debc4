"""PipeMorph trainer: runs the stages of a pipeline under the plans of the core.

Names that are slow to import are imported at their first use: the agent and the preflight, which
are in this package, must start fast and do not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipemorph.extras import require_torch_version
from pipemorph.removed import NAMES, describe_removal
from pipemorph_trainer.errors import (
    BatchError,
    PeerLostError,
    PipelineError,
    ShapeError,
    UnwrittenError,
    WaitTimeoutError,
)

if TYPE_CHECKING:
    from pipemorph.spec.sections.trainer import Checkpoint
    from pipemorph_trainer.backward.custom_linear import register_function
    from pipemorph_trainer.context import TrainerContext
    from pipemorph_trainer.executor.emulated_stage import EmulatedStage
    from pipemorph_trainer.observe import observe
    from pipemorph_trainer.pipeline import Pipeline
    from pipemorph_trainer.schedule.microbatch_source import Microbatch
    from pipemorph_trainer.settings import Options
    from pipemorph_trainer.sync.scaler import GradScaler
    from pipemorph_trainer.topology.mesh import make_mesh
    from pipemorph_trainer.topology.model_shard import ModelShard

__all__ = [
    "BatchError",
    "Checkpoint",
    "EmulatedStage",
    "GradScaler",
    "Microbatch",
    "ModelShard",
    "Options",
    "PeerLostError",
    "Pipeline",
    "PipelineError",
    "ShapeError",
    "TrainerContext",
    "UnwrittenError",
    "WaitTimeoutError",
    "make_mesh",
    "observe",
    "register_function",
]

_LATE = {
    "Checkpoint": "pipemorph.spec.sections.trainer",
    "EmulatedStage": ".executor.emulated_stage",
    "GradScaler": ".sync.scaler",
    "Options": ".settings",
    "Microbatch": ".schedule.microbatch_source",
    "ModelShard": ".topology.model_shard",
    "Pipeline": ".pipeline",
    "observe": ".observe",
    "TrainerContext": ".context",
    "make_mesh": ".topology.mesh",
    "register_function": ".backward.custom_linear",
}


def __getattr__(name: str) -> Any:
    if gone := describe_removal(NAMES, name):
        # An AttributeError would lose these words in "from pipemorph_trainer import".
        raise ImportError(f"{name} {gone}", name=__name__)
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_torch_version()
    return getattr(import_module(_LATE[name], __name__), name)
