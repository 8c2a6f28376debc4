"""Trackers: rank 0 passes finished iterations to the script's functions, and to Kubeflow."""

from pipemorph_trainer.trackers.finished_iteration import FinishedIteration, PlanChange

__all__ = ["FinishedIteration", "PlanChange"]
