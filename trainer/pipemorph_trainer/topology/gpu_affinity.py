"""Which GPU a rank has: its UUID, PCI address and NUMA node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipemorph.discovery import numa


def pci_address(index: int) -> str:
    """PCI address of a CUDA device in the form of sysfs: ``0000:1b:00.0``."""
    p: Any = torch.cuda.get_device_properties(index)  # the stubs lack the PCI address
    return f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"


def gpu_of(device: torch.device) -> str | None:
    """UUID of a CUDA device, the same in every process that sees it; None for the CPU."""
    if device.type != "cuda":
        return None
    found: Any = torch.cuda.get_device_properties(device)
    return str(found.uuid)


def near(device: torch.device, pci: Path = numa.PCI) -> dict[str, int]:
    """The engine's option ``numa_node`` for a stage on this device. Empty if unknown: for a stage
    on the CPU, a single node, or a firmware without the information."""
    if device.type != "cuda":
        return {}
    index = torch.cuda.current_device() if device.index is None else device.index
    node = numa.node_of(pci / pci_address(index))
    return {} if node is None else {"numa_node": node}
