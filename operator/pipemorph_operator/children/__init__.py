"""Desired objects of an attempt. Pure: a job, an attempt number and the installation in."""

from pipemorph_operator.children.attempt import Attempt, Unbuildable
from pipemorph_operator.children.objects import objects

__all__ = ["Attempt", "Unbuildable", "objects"]
