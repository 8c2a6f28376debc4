"""Builds the Kubernetes objects of an attempt. Pure: job, attempt number, configuration in."""

from pipemorph_operator.children.attempt import Attempt, Unbuildable
from pipemorph_operator.children.objects import lasting_objects, objects
from pipemorph_operator.children.placement import shares_small_memory
from pipemorph_operator.children.pod import idle_gpus

__all__ = [
    "Attempt",
    "Unbuildable",
    "idle_gpus",
    "lasting_objects",
    "objects",
    "shares_small_memory",
]
