"""``python -m pipemorph_trainer.devices``: what torch and the engine see here, as JSON.

For `pipemorph doctor`, which is part of the core and imports neither.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from pipemorph_trainer.links import engine_module
from pipemorph_trainer.placement import pci_address


def facts() -> dict[str, Any]:
    """``torch``: its version; ``engine``: built or not; ``gpus``: name, bytes, PCI address."""
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
    return {"torch": torch.__version__, "engine": engine_module() is not None, "gpus": gpus}


if __name__ == "__main__":
    print(json.dumps(facts()))
