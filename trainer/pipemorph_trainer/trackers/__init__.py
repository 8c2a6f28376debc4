"""Passes what rank 0 knows of each finished iteration to experiment trackers."""

from pipemorph_trainer.trackers.adapters import MLflow, TensorBoard, WandB
from pipemorph_trainer.trackers.finished import FinishedIteration, PlanChange

__all__ = ["FinishedIteration", "MLflow", "PlanChange", "TensorBoard", "WandB"]
