"""Passes what rank 0 knows of finished iterations to the script's functions, and to Kubeflow."""

from pipemorph_trainer.trackers.finished import FinishedIteration, PlanChange

__all__ = ["FinishedIteration", "PlanChange"]
