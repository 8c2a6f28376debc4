"""Moves the activations of microbatches to host memory and back.

:mod:`pipemorph.planning.offload` decides which microbatches are offloaded. See the section
"Activations in host memory" of ``docs/trainer.md``.
"""

from pipemorph_trainer.executor.offload.pool import HostPool
from pipemorph_trainer.executor.offload.store import ActivationStore, SavedFlight

__all__ = ["ActivationStore", "HostPool", "SavedFlight"]
