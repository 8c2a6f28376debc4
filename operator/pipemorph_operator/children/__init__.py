"""Builds the Kubernetes objects of an attempt. Pure: job, attempt number, configuration in."""

from pipemorph_operator.children.attempt import Attempt, Unbuildable
from pipemorph_operator.children.objects import objects

__all__ = ["Attempt", "Unbuildable", "objects"]
