"""Moves the activations of microbatches to host memory and back.

:mod:`pipemorph.planning.offload` decides which microbatches are offloaded. See
``docs/activation-memory.md``.
"""

from pipemorph_trainer.memory.activation_store import ActivationStore, SavedActivations
from pipemorph_trainer.memory.host_pool import HostPool

__all__ = ["ActivationStore", "HostPool", "SavedActivations"]
