"""Builds the Kubernetes objects of an attempt from its job, number and configuration. Pure."""

from pipemorph_operator.resources.attempt import Attempt, ResourceBuildError
from pipemorph_operator.resources.attempt_objects import build_lasting_objects, build_objects
from pipemorph_operator.resources.placement import shares_default_shm
from pipemorph_operator.resources.pod_builder import count_idle_gpus

__all__ = [
    "Attempt",
    "ResourceBuildError",
    "build_lasting_objects",
    "build_objects",
    "count_idle_gpus",
    "shares_default_shm",
]
