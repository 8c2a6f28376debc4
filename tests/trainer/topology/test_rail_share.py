"""Use of a host's RDMA ports by its ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pipemorph.doctor.rdma import Gid, RdmaDevice, RdmaPort
from pipemorph_trainer.topology.gpu_affinity import assign_rails

ROUTABLE = Gid(index=3, address="::ffff:10.0.0.1", type="RoCE v2", netdev="eth0")


def device(name: str, pci: str | None = None, *, state: str = "ACTIVE") -> RdmaDevice:
    port = RdmaPort(name, 1, state, "LinkUp", None, "Ethernet", (ROUTABLE,), {})
    return RdmaDevice(name, pci, (port,))


@pytest.fixture
def host(tmp_path: Path) -> tuple[Path, list[RdmaDevice], list[str]]:
    """Host of eight GPUs and eight cards; a GPU and a card under each PCI switch."""
    cards, gpus = [], []
    for i in range(8):
        switch = tmp_path / f"root{i // 4}" / f"switch{i}"
        for bus, found in ((0x10 + i, gpus), (0x40 + 7 - i, cards)):
            address = f"0000:{bus:02x}:00.0"
            (switch / address).mkdir(parents=True)
            (tmp_path / address).symlink_to(switch / address)
            found.append(address)
    devices = [device(f"mlx5_{i}", address) for i, address in enumerate(cards)]
    return tmp_path, devices, gpus


def test_every_rank_has_the_port_next_to_its_gpu_and_another(
    host: tuple[Path, list[RdmaDevice], list[str]],
) -> None:
    pci, devices, gpus = host
    shares = [assign_rails(devices, rank, 8, gpus, pci) for rank in range(8)]
    assert [found[0] for found in shares] == [f"mlx5_{rank}" for rank in range(8)]
    assert Counter(found[1] for found in shares) == {f"mlx5_{i}": 1 for i in range(8)}
    half = [{int(name[-1]) // 4 for name in found} for found in shares]
    assert half == [{rank // 4} for rank in range(8)], "no byte crosses the host"


def test_four_ranks_share_eight_ports_two_each(
    host: tuple[Path, list[RdmaDevice], list[str]],
) -> None:
    _, devices, _ = host
    shares = [assign_rails(devices, rank, 4, []) for rank in range(4)]
    assert sorted(name for found in shares for name in found) == [f"mlx5_{i}" for i in range(8)]


def test_few_ports_and_lone_ranks_use_all() -> None:
    two = [device("mlx5_0"), device("mlx5_1")]
    assert assign_rails(two, 3, 8, []) == []
    three = [*two, device("mlx5_2")]
    assert assign_rails(three, 0, 1, []) == []
    assert assign_rails([], 0, 8, []) == []
    assert len(assign_rails(three, 0, 8, [])) == 2
    down = [*two, device("mlx5_2", state="DOWN")]
    assert assign_rails(down, 0, 8, []) == [], "two of them work"


def test_ports_of_one_card_are_one() -> None:
    cards = [device(f"mlx5_{i}", f"0000:{i // 2}a:00.0") for i in range(8)]
    assert assign_rails(cards, 0, 2, []) == ["mlx5_0", "mlx5_4"]
    assert assign_rails(cards, 1, 2, []) == ["mlx5_2", "mlx5_6"]
