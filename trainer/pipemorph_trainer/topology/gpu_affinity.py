"""GPU of a rank (UUID, PCI address, NUMA node), and the RDMA ports near it that the rank uses.

If every rank of a host used every port, queue pairs would grow with ranks × ports, and most bytes
would cross the host's PCI bridges. So ranks share out the ports. Each gets at least
:data:`LEAST_RAILS`, so that it survives the loss of a port.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pipemorph.doctor import numa, rdma


def get_pci_address(index: int) -> str:
    """Return the PCI address of a CUDA device in the form of sysfs: ``0000:1b:00.0``."""
    p: Any = torch.cuda.get_device_properties(index)  # the stubs lack the PCI address
    return f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"


def get_gpu_uuid(device: torch.device) -> str | None:
    """Return the UUID of a CUDA device, the same in all processes; None for the CPU."""
    if device.type != "cuda":
        return None
    found: Any = torch.cuda.get_device_properties(device)
    return str(found.uuid)


def find_numa_option(device: torch.device, pci: Path = numa.PCI) -> dict[str, int]:
    """Return the engine's option ``numa_node`` for a stage on this device. Empty if unknown: on the
    CPU, with a single node, or without information from the firmware."""
    if device.type != "cuda":
        return {}
    index = torch.cuda.current_device() if device.index is None else device.index
    node = numa.read_numa_node(pci / get_pci_address(index))
    return {} if node is None else {"numa_node": node}


LEAST_RAILS = 2


def choose_own_rails(local_rank: int, local_ranks: int) -> list[str]:
    """Choose the RDMA devices of a rank. Empty: all, since it is alone or there are few."""
    gpus = []
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks:
        gpus = [get_pci_address(index) for index in range(local_ranks)]
    return assign_rails(rdma.read_devices() or [], local_rank, local_ranks, gpus)


def assign_rails(
    devices: Sequence[rdma.RdmaDevice],
    local_rank: int,
    local_ranks: int,
    gpus: Sequence[str],
    pci: Path = numa.PCI,
) -> list[str]:
    """Assign cards to the ranks of a host; return a device of each card of ``local_rank``.
    ``gpus``: PCI address per local rank, empty for ranks on the CPU.

    Every rank computes the shares of all. In each round each rank, in order, takes a card: the
    nearest of those with the fewest ranks so far.
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
            others = [card for card in ranks_on if card not in own]
            # min() takes the first of equal ones, so all ranks choose alike.
            card = min(
                others, key=lambda card: (ranks_on[card], -_count_shared_bridges(gpu, card, pci))
            )
            own.append(card)
            ranks_on[card] += 1
    return [cards[card].name for card in taken[local_rank]]


def _count_shared_bridges(gpu: str, card: str, pci: Path) -> int:
    """Count the PCI bridges that two devices share; 0 if a location is unknown."""
    paths = [pci / address for address in (gpu, card)]
    if not gpu or not all(path.exists() for path in paths):
        return 0
    one, other = (path.resolve().parts for path in paths)
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return same
