"""Activations in host memory: a microbatch's saved tensors leave the device and come back.

:mod:`pipemorph.planning.offload` says which microbatches go; here is how. See
``docs/trainer.md``, "Activations in host memory".
"""

from pipemorph_trainer.executor.offload.pool import HostPool
from pipemorph_trainer.executor.offload.store import ActivationStore, SavedFlight

__all__ = ["ActivationStore", "HostPool", "SavedFlight"]
