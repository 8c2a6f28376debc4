"""The devices of this machine, and the one that a rank uses.

``python -m pipemorph_trainer.devices`` prints as JSON what torch and the engine see, for
`pipemorph doctor`, which is part of the core and imports neither.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from pipemorph.errors import InputError
from pipemorph_trainer.links.engine import engine_module
from pipemorph_trainer.topology.gpu_affinity import pci_address


def own_device(local_rank: int, *, share: bool = False) -> torch.device:
    """This rank's GPU if every rank of this machine can have one, else the CPU: NCCL does not allow
    two ranks on a GPU. ``LOCAL_WORLD_SIZE`` is the number of ranks on the machine.

    ``share``: ranks share GPUs where there are too few, which works while only delegated links,
    and no group of NCCL, are between them.

    Raises :class:`InputError` if it is not a number.
    """
    told = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not told.isdecimal():
        raise InputError(f"LOCAL_WORLD_SIZE is {told!r}; expected the ranks of this machine")
    ranks = max(int(told), local_rank + 1)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus >= ranks or (share and gpus):
        return torch.device("cuda", local_rank % gpus)
    return torch.device("cpu")


def facts() -> dict[str, Any]:
    """``torch``: version; ``engine``: whether it is built; ``gpus``: name, bytes, PCI address."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = []
    for i in range(count):
        p = torch.cuda.get_device_properties(i)
        gpus.append(
            {
                "name": p.name,
                "bytes": p.total_memory,
                "pci": pci_address(i),
            }
        )
    return {
        "torch": torch.__version__,
        "engine": engine_module() is not None,
        "gpus": gpus,
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
