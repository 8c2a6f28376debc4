"""Which GPU a rank has (its UUID, PCI address and NUMA node), and which RDMA ports it uses, each
near its GPU.

If every rank of a host used every port, queue pairs would grow with ranks × ports, and most bytes
would cross the host's PCI bridges. So the ports are shared out. A rank keeps :data:`LEAST_RAILS`
ports, so that it survives a port.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pipemorph.discovery import numa, rdma


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


LEAST_RAILS = 2


def own_rails(local_rank: int, local_ranks: int) -> list[str]:
    """The RDMA devices that a rank uses; empty: all, since it is alone or there are few."""
    gpus = []
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks:
        gpus = [pci_address(index) for index in range(local_ranks)]
    return share(rdma.devices() or [], local_rank, local_ranks, gpus)


def share(
    devices: Sequence[rdma.Device],
    local_rank: int,
    local_ranks: int,
    gpus: Sequence[str],
    pci: Path = numa.PCI,
) -> list[str]:
    """One device of each card that ``local_rank`` uses. ``gpus``: PCI address per local rank, empty
    for ranks on the CPU.

    Every rank computes the shares of all. In each round every rank takes one card, in the order of
    ranks: of those with the fewest ranks so far, the nearest.
    """
    cards = {device.pci or device.name: device for device in reversed(devices)
             if any(port.usable for port in device.ports)}  # fmt: skip
    each = max(LEAST_RAILS, len(cards) // max(1, local_ranks))
    if local_ranks <= 1 or len(cards) <= each:
        return []
    ranks_on = dict.fromkeys(sorted(cards), 0)
    taken: list[list[str]] = [[] for _ in range(local_ranks)]
    for _ in range(each):
        for rank, own in enumerate(taken):
            gpu = gpus[rank] if gpus else ""
            left = [card for card in ranks_on if card not in own]
            # min() takes the first of equal ones, so all ranks choose alike.
            card = min(left, key=lambda card: (ranks_on[card], -_near(gpu, card, pci)))
            own.append(card)
            ranks_on[card] += 1
    return [cards[card].name for card in taken[local_rank]]


def _near(gpu: str, card: str, pci: Path) -> int:
    """Number of PCI bridges that two devices share; 0 if a place is unknown."""
    paths = [pci / address for address in (gpu, card)]
    if not gpu or not all(path.exists() for path in paths):
        return 0
    one, other = (path.resolve().parts for path in paths)
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return same
