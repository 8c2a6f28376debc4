"""The NUMA node of a GPU, as the engine receives it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipemorph_trainer.topology.gpu_affinity import find_numa_option, get_pci_address


@pytest.fixture
def pci(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host with two GPUs, which this one has none of."""

    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B + index, pci_device_id=0)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for address, node in (("0000:1b:00.0", 0), ("0000:1c:00.0", 1)):
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(f"{node}\n")
    return tmp_path


def test_slots_come_from_the_gpus_node(pci: Path) -> None:
    assert get_pci_address(1) == "0000:1c:00.0"
    assert find_numa_option(torch.device("cuda", 0), pci) == {"numa_node": 0}
    assert find_numa_option(torch.device("cuda", 1), pci) == {"numa_node": 1}
    assert find_numa_option(torch.device("cuda"), pci) == {"numa_node": 1}, "the current device"


def test_what_is_not_known_is_not_said(pci: Path) -> None:
    (pci / "0000:1b:00.0" / "numa_node").write_text("-1\n")
    assert find_numa_option(torch.device("cuda", 0), pci) == {}
    assert find_numa_option(torch.device("cuda", 0), pci / "nowhere") == {}
    assert find_numa_option(torch.device("cpu"), pci) == {}
