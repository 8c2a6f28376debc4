"""PipeMorph trainer: runs the stages of a pipeline and follows the plans of the core."""

from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.emulated import EmulatedStage
from pipemorph_trainer.errors import PeerLostError, PipelineError, ShapeError, WaitTimeoutError
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
