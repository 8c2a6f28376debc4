"""``python -m pipemorph_trainer.devices``: what torch and the engine see here, as JSON.

For `pipemorph doctor`, which is part of the core and imports neither.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from pipemorph_trainer.links import engine_module


def facts() -> dict[str, Any]:
    """``torch``: its version; ``engine``: built or not; ``gpus``: name, bytes, PCI address."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = []
    for i in range(count):
        p: Any = torch.cuda.get_device_properties(i)  # the stubs lack the PCI address
        gpus.append(
            {
                "name": p.name,
                "bytes": p.total_memory,
                "pci": f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0",
            }
        )
    return {"torch": torch.__version__, "engine": engine_module() is not None, "gpus": gpus}


if __name__ == "__main__":
    print(json.dumps(facts()))
