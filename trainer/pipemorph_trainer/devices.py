"""Devices of this machine, and the one that a rank uses.

``python -m pipemorph_trainer.devices`` prints as JSON the devices that torch and the engine see,
for `pipemorph doctor`, which is part of the core and imports neither.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from pipemorph.errors import InputError
from pipemorph_trainer.topology.gpu_affinity import get_pci_address
from pipemorph_trainer.transport.engine_setup import load_engine_module


def choose_device(local_rank: int, *, share: bool = False) -> torch.device:
    """Return this rank's GPU if every rank of this machine can have one, else the CPU: NCCL does
    not allow two ranks on a GPU. ``LOCAL_WORLD_SIZE`` is the number of ranks on the machine.

    ``share``: ranks share GPUs if there are too few, which works while only delegated links, and no
    group of NCCL, connect them.

    Raises :class:`InputError` if it is no number.
    """
    given = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not given.isdecimal():
        raise InputError(f"LOCAL_WORLD_SIZE is {given!r}; expected the ranks of this machine")
    ranks = max(int(given), local_rank + 1)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus >= ranks or (share and gpus):
        return torch.device("cuda", local_rank % gpus)
    return torch.device("cpu")


def collect_device_facts() -> dict[str, Any]:
    """Return ``torch``: version; ``engine``: True if built; ``gpus``: name, bytes, PCI address."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = []
    for i in range(count):
        p = torch.cuda.get_device_properties(i)
        gpus.append(
            {
                "name": p.name,
                "bytes": p.total_memory,
                "pci": get_pci_address(i),
            }
        )
    return {
        "torch": torch.__version__,
        "engine": load_engine_module() is not None,
        "gpus": gpus,
    }


if __name__ == "__main__":
    print(json.dumps(collect_device_facts()))
