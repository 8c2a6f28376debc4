"""Observation of a training job that PipeMorph does not run: its ops, recorded while it trains.

    import pipemorph_trainer

    pipemorph_trainer.observe("ops")

Neither the schedule nor the numbers change, and an error of the observation never reaches the
training: it is logged once, and the observation ends. ``docs/how-to/observe.md`` has more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from pipemorph_trainer.observe.deepspeed import hook_deepspeed
from pipemorph_trainer.observe.import_hooks import call_after_import
from pipemorph_trainer.observe.megatron_core import hook_megatron
from pipemorph_trainer.observe.observation import Observation
from pipemorph_trainer.observe.torch_pipelines import hook_loaders, hook_optimizers, hook_schedules

__all__ = ["Observation", "observe"]

FOLDER_VARIABLE = "PIPEMORPH_OBSERVE"
"""Environment variable with the folder of the op tables, for ``sitecustomize``."""
MOST_BYTES = 256 << 20
"""Limit of a rank's op tables on disk. A step of 100 ops has about 20 kB."""

_HOOKED_MODULES: dict[str, Callable[[Observation, Any], None]] = {
    "torch.distributed.pipelining.schedules": hook_schedules,
    "torch.optim.optimizer": hook_optimizers,
    "torch.utils.data.dataloader": hook_loaders,
    "megatron.core.pipeline_parallel.schedules": hook_megatron,
    "deepspeed.runtime.pipe.engine": hook_deepspeed,
}
"""Function that hooks a module, by the module's name."""

_observations: list[Observation] = []


def observe(folder: str | Path | None = None, *, most_bytes: int = MOST_BYTES) -> Observation:
    """Observe the pipelines of this process, whether their package was imported before or not.

    ``folder``: where each rank writes an op table for ``pipemorph diagnose``; by default that of
    the environment variable ``PIPEMORPH_OBSERVE``, otherwise ``ops``. ``most_bytes``: limit of a
    rank's recording; the newest steps are kept. Returns the observation, whose ``stop`` ends it; a
    call while one is active returns that one.
    """
    if _observations and _observations[-1].active:
        return _observations[-1]
    where = Path(folder or os.environ.get(FOLDER_VARIABLE) or "ops")
    observation = Observation(where, most_bytes)
    _observations[:] = [observation]
    observation.guard(observation.hook_process)
    for name, install in _HOOKED_MODULES.items():
        call_after_import(name, partial(_hook_module, observation, install, name))
    return observation


def _hook_module(
    observation: Observation, install: Callable[[Observation, Any], None], name: str
) -> None:
    if observation.active:
        observation.guard(install, observation, sys.modules[name])


class _CallableModule(ModuleType):
    """Lets ``pipemorph_trainer.observe`` be run by ``python -m`` and called as a function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Observation:
        return observe(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
