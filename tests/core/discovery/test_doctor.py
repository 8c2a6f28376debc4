"""`pipemorph doctor` and the discovery behind it, on sysfs trees as real drivers make them."""

from __future__ import annotations

import json
import os
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipemorph.cli import main
from pipemorph.commands import doctor
from pipemorph.doctor import cgroup, host, numa, rdma, verbs
from pipemorph.doctor.checks import Check, HostFacts, format_size, run_checks

GIDS_BEST_FIRST = Path(__file__).parents[2] / "engine" / "gids_best_first.txt"
ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
V1_LOCAL = ("fe80:0000:0000:0000:0ac0:ebff:fe12:3456", "IB/RoCE v1", "eth1")
V2_LOCAL = ("fe80:0000:0000:0000:0ac0:ebff:fe12:3456", "RoCE v2", "eth1")
V1_MAPPED = ("0000:0000:0000:0000:0000:ffff:0a01:0203", "IB/RoCE v1", "eth1")
V2_MAPPED = ("0000:0000:0000:0000:0000:ffff:0a01:0203", "RoCE v2", "eth1")
V2_APIPA = ("0000:0000:0000:0000:0000:ffff:a9fe:0203", "RoCE v2", "eth1")


def put(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def unreadable(path: Path) -> None:
    """Reading it is an error, also for root."""
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)


def make_device(
    sysfs: Path,
    name: str,
    gids: list[tuple[str, str, str]],
    *,
    state: str = "4: ACTIVE",
    link_layer: str = "Ethernet",
    counters: dict[str, object] | None = None,
) -> None:
    port = sysfs / name / "ports" / "1"
    put(port / "state", state)
    put(port / "phys_state", "5: LinkUp" if "ACTIVE" in state else "3: Disabled")
    put(port / "rate", "100 Gb/sec (4X EDR)")
    put(port / "link_layer", link_layer)
    for i in range(8):
        put(port / "gids" / str(i), gids[i][0] if i < len(gids) else ZERO)
        if i < len(gids):  # reading the type of an empty entry is an error, as on real drivers
            put(port / "gid_attrs" / "types" / str(i), gids[i][1])
            put(port / "gid_attrs" / "ndevs" / str(i), gids[i][2])
    for counter, value in (counters or {}).items():
        put(port / counter, value)


def facts(devices: list[rdma.RdmaDevice] | None, **changes: Any) -> HostFacts:
    """A host on which everything else is fine."""
    fine = HostFacts(
        devices=devices,
        verbs=verbs.VerbsSupport(True, None, True, None, {}),
        uverbs=[("uverbs0", True)],
        locked_bytes=host.UNLIMITED,
        may_lock=False,
        huge_pages=[host.HugePages(2 << 20, 8, 4)],
        transparent_huge_pages="madvise",
        shared_memory=(8 << 30, 8 << 30),
        modules=["ib_uverbs"],
        trainer={"torch": "2.11", "engine": True, "gpus": []},
        trainer_error=None,
    )
    return replace(fine, **changes)


def line(lines: list[Check], name: str) -> Check:
    (found,) = [c for c in lines if c.name == name]
    return found


def test_gids_are_ranked_as_the_engine_ranks_them(tmp_path: Path) -> None:
    make_device(tmp_path, "mlx5_0", [V1_LOCAL, V2_LOCAL, V1_MAPPED, V2_APIPA, V2_MAPPED])
    (device,) = rdma.read_devices(tmp_path) or []
    (port,) = device.ports
    assert [g.index for g in port.gids] == [4, 3, 1, 2, 0]
    assert port.gids[0].address == "::ffff:10.1.2.3"
    assert port.gids[0].display_address == "10.1.2.3"
    local, routable = "link-local", "routable"
    assert [g.kind for g in port.gids] == [routable, local, local, routable, local]
    assert port.usable
    assert device.pci is None
    # The table that the engine's own test reads, too.
    types = {"v1": "IB/RoCE v1", "v2": "RoCE v2"}
    ranked = [
        rdma.Gid(int(index), address, types[kind], None if netdev == "-" else netdev)
        for index, address, kind, netdev in map(
            str.split, filter(lambda row: row[0] != "#", GIDS_BEST_FIRST.read_text().splitlines())
        )
    ]
    assert len(ranked) >= 10
    by_index = sorted(ranked, key=lambda gid: gid.index)
    assert sorted(by_index, key=lambda gid: gid.sort_key) == ranked


def test_a_port_without_routes_is_not_usable(tmp_path: Path) -> None:
    make_device(tmp_path, "down", [V2_MAPPED], state="1: DOWN")
    make_device(tmp_path, "local", [V1_LOCAL, V2_LOCAL])
    make_device(tmp_path, "old", [V1_MAPPED])
    make_device(tmp_path, "none", [])
    make_device(tmp_path, "ib", [V1_LOCAL], link_layer="InfiniBand")
    found = rdma.read_devices(tmp_path)
    assert {d.name: d.ports[0].usable for d in found or []} == {
        "down": False, "local": False, "old": False, "none": False, "ib": True,
    }  # fmt: skip
    lines = run_checks(facts(found), frozenset({"rdma"}))
    # A good rail is there, so the rest is only worth a warning.
    assert line(lines, "RDMA devices").verdict == "ok"
    assert line(lines, "port down/1").verdict == "warning"
    assert "DOWN Disabled" in line(lines, "port down/1").found
    assert "link-local" in line(lines, "port local/1 GIDs").advice
    assert "RoCE v1" in line(lines, "port old/1 GIDs").advice
    assert line(lines, "port none/1 GIDs").found == "none"
    only_bad = [d for d in found or [] if d.name != "ib"]
    lines = run_checks(facts(only_bad), frozenset({"rdma"}))
    assert line(lines, "RDMA devices").verdict == "missing"
    assert line(lines, "port down/1").verdict == "missing"


def test_counters_that_cannot_be_read_are_unavailable_and_never_zero(tmp_path: Path) -> None:
    make_device(
        tmp_path,
        "rxe0",
        [V2_MAPPED],
        counters={
            "counters/link_downed": 3,
            "counters/symbol_error": 0,
            "hw_counters/completer_retry_err": "N/A (no PMA)",
            "counters/not_about_health": 7,
        },
    )
    unreadable(tmp_path / "rxe0/ports/1/hw_counters/send_err")
    make_device(tmp_path, "rxe1", [V2_MAPPED])
    found = rdma.read_devices(tmp_path) or []
    assert found[0].ports[0].counters == {
        "link_downed": 3, "symbol_error": 0, "completer_retry_err": None, "send_err": None,
    }  # fmt: skip
    assert found[1].ports[0].counters == {}
    lines = run_checks(facts(found))
    said = line(lines, "port rxe0/1 counters").found
    assert said == "2 read: link_downed 3; unavailable: completer_retry_err, send_err"
    assert line(lines, "port rxe1/1 counters") == Check(
        "port rxe1/1 counters",
        "unavailable",
        "unavailable",
        line(lines, "port rxe1/1 counters").advice,
    )


def test_no_infiniband_in_the_kernel_differs_from_no_device(tmp_path: Path) -> None:
    assert rdma.read_devices(tmp_path / "nowhere") is None
    assert rdma.read_devices(tmp_path) == []
    said = line(run_checks(facts(None)), "RDMA devices")
    assert said.verdict == "absent"
    assert "no InfiniBand" in said.found
    said = line(run_checks(facts([]), frozenset({"rdma"})), "RDMA devices")
    assert said.verdict == "missing"
    assert "no device" in said.found


@pytest.mark.parametrize(
    ("limit", "capable", "fine"),
    [(8 << 20, False, False), (8 << 20, True, True), (2 << 30, False, True), (-1, False, True)],
)
def test_locked_memory(limit: int, capable: bool, fine: bool) -> None:
    found = facts([], locked_bytes=limit, may_lock=capable)
    said = line(run_checks(found, frozenset({"rdma"})), "locked memory")
    assert said.verdict == ("ok" if fine else "missing")
    assert fine or ("8 MiB" in said.found and "ulimit -l" in said.advice)


def test_everything_else_that_can_be_wrong() -> None:
    bad = facts(
        None,
        verbs=verbs.VerbsSupport(False, "no such file", False, "No module named 'pyverbs'", {}),
        uverbs=[("uverbs0", False)],
        huge_pages=None,
        transparent_huge_pages=None,
        shared_memory=(64 << 20, 1 << 20),
        modules=None,
        trainer=None,
        trainer_error="No module named 'torch'",
    )
    lines = run_checks(bad, frozenset({"engine", "gpu"}))
    verdicts = {c.name: c.verdict for c in lines}
    assert verdicts == {
        "RDMA devices": "absent",
        "verbs devices": "absent",
        "libibverbs": "absent",
        "pyverbs": "absent",
        "locked memory": "ok",
        "huge pages": "unavailable",
        "/dev/shm": "warning",
        "kernel modules": "unavailable",
        "transfer engine": "missing",
        "GPUs": "missing",
    }
    assert all(c.advice for c in lines if c.verdict in ("absent", "missing", "warning"))
    assert "uverbs0" in line(lines, "verbs devices").found
    gpu = {"name": "H100", "bytes": 80 << 30, "pci": "0000:1b:00.0"}
    good = facts(None, trainer={"torch": "2.11", "engine": False, "gpus": [gpu]})
    lines = run_checks(good, frozenset({"gpu"}))
    assert line(lines, "GPUs").found == "H100 (80 GiB, 0000:1b:00.0)"
    assert line(lines, "transfer engine").verdict == "absent"


def test_the_host_is_read_as_the_kernel_writes_it(tmp_path: Path) -> None:
    put(tmp_path / "status", "Name:\tx\nCapEff:\t0000000000004000")
    assert host.has_ipc_lock(tmp_path / "status")
    put(tmp_path / "status", "Name:\tx\nCapEff:\t0000000000003fff")
    assert not host.has_ipc_lock(tmp_path / "status")
    put(tmp_path / "huge/hugepages-2048kB/nr_hugepages", 512)
    put(tmp_path / "huge/hugepages-2048kB/free_hugepages", 500)
    assert host.read_huge_pages(tmp_path / "huge") == [host.HugePages(2 << 20, 512, 500)]
    assert host.read_huge_pages(tmp_path / "none") is None
    put(tmp_path / "thp", "always [madvise] never")
    assert host.read_transparent_huge_pages(tmp_path / "thp") == "madvise"
    put(tmp_path / "modules", "mlx5_ib 1 0 - Live 0x0\next4 1 0 - Live 0x0")
    (tmp_path / "module" / "ib_core").mkdir(parents=True)
    assert host.list_loaded_modules(tmp_path / "modules", tmp_path / "module") == [
        "ib_core",
        "mlx5_ib",
    ]
    assert host.list_loaded_modules(tmp_path / "nowhere", tmp_path / "nowhere") is None
    assert host.measure_shared_memory(tmp_path / "nowhere") is None
    assert [format_size(n) for n in (12, 8 << 20, 3 << 29)] == ["12 bytes", "8 MiB", "1.5 GiB"]


@pytest.mark.parametrize(
    ("own", "files", "limits"),
    [
        (None, {}, (8, None)),
        ("0::/", {}, (8, None)),
        ("0::/", {"cpu.max": "max 100000", "memory.max": "max"}, (8, None)),
        ("0::/", {"cpu.max": "250000 100000", "memory.max": "4096"}, (2.5, 4096)),
        ("0::/", {"cpu.max": "900000 100000"}, (8, None)),
        ("0::/", {"cpu.max": "250000", "memory.max": "plenty"}, (8, None)),
        ("0::/pod/box", {"memory.max": "4096", "pod/memory.max": "512"}, (8, 512)),
        (
            "0::/pod/box",
            {"pod/box/cpu.max": "100000 100000", "cpu.max": "50000 100000"},
            (0.5, None),
        ),
        ("0::/pod", {"other/memory.max": "1", "memory.max": "4096"}, (8, 4096)),
        ("4:memory:/pod\n0::/box", {"pod/memory.max": "1", "box/memory.max": "2"}, (8, 2)),
        ("4:memory:/pod", {"pod/memory.max": "1"}, (8, None)),
        ("0::/pod", {"cpu.max": None, "memory.max": None, "pod/memory.max": "7"}, (8, 7)),
    ],
)
def test_the_least_limit_of_all_control_groups_counts(
    own: str | None,
    files: dict[str, str | None],
    limits: tuple[float, int | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Limits of groups that are absent, or cannot be read, are none. ``None``: unreadable."""
    monkeypatch.setattr(cgroup.os, "sched_getaffinity", lambda _: set(range(8)))
    root, mine = tmp_path / "groups", tmp_path / "own"
    if own is not None:
        put(mine, own)
    for name, text in files.items():
        if text is None:
            unreadable(root / name)
        else:
            put(root / name, text)
    assert (cgroup.count_processors(root, mine), cgroup.read_memory_limit(root, mine)) == limits


@pytest.mark.parametrize(
    ("own", "groups", "room"),
    [
        ("0::/", {"": ("max", 7, 0)}, None),
        ("0::/", {"": (100, 70, 20)}, 50),
        # Limits of Slurm and systemd: below the root, of the process or above it.
        ("0::/slurm/job/step", {"slurm/job": (100, 70, 0), "slurm/job/step": ("max", 60, 0)}, 30),
        ("0::/user.slice/run.scope", {"user.slice/run.scope": (50, 60, 5), "": (900, 1, 0)}, -5),
        ("0::/a/b", {"a": (100, 10, 0), "a/b": (80, 10, 0), "": ("max", 10, 0)}, 70),
        ("0::/a", {"b": (1, 1, 0)}, None),
        ("4:memory:/a", {"a": (1, 1, 0)}, None),
    ],
)
def test_room_is_that_of_the_group_that_has_least(
    own: str, groups: dict[str, tuple[int | str, int, int]], room: int | None, tmp_path: Path
) -> None:
    root, mine = tmp_path / "groups", tmp_path / "own"
    put(mine, own)
    for name, (limit, used, idle) in groups.items():
        put(root / name / "memory.max", limit)
        put(root / name / "memory.current", used)
        put(root / name / "memory.stat", f"anon 5\ninactive_file {idle}\nactive_file 9")
    assert cgroup.read_memory_headroom(root, mine) == room


def test_memory_is_that_of_the_host_or_less(tmp_path: Path) -> None:
    whole = host.usable_memory_bytes(tmp_path)
    assert whole > 1 << 20
    for limit, found in ((1 << 62, whole), (4096, 4096)):
        put(tmp_path / "memory.max", limit)
        assert host.usable_memory_bytes(tmp_path) == found


def test_facts_that_a_host_does_not_give_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "status", "Name:\tx")
    assert not host.has_ipc_lock(tmp_path / "status")
    for limit, fine in ((host.LEAST_LOCKED_BYTES - 1, False), (host.LEAST_LOCKED_BYTES, True)):
        assert host.is_locked_memory_enough(limit, False) is fine
    pages = tmp_path / "huge/hugepages-2048kB"
    put(pages / "nr_hugepages", 512)
    assert host.read_huge_pages(tmp_path / "huge") is None, "a file is missing"
    put(pages / "free_hugepages", "many")
    assert host.read_huge_pages(tmp_path / "huge") is None
    unreadable(pages / "free_hugepages")
    assert host.read_huge_pages(tmp_path / "huge") is None
    put(tmp_path / "thp", "always madvise never")
    assert host.read_transparent_huge_pages(tmp_path / "thp") is None
    unreadable(tmp_path / "thp")
    assert host.read_transparent_huge_pages(tmp_path / "thp") is None
    (tmp_path / "module" / "ib_core").mkdir(parents=True)
    assert host.list_loaded_modules(tmp_path / "thp", tmp_path / "module") == ["ib_core"]
    sizes = types.SimpleNamespace(f_frsize=4096, f_blocks=9, f_bfree=7, f_bavail=5)
    monkeypatch.setattr(host.os, "statvfs", lambda _: sizes)
    assert host.measure_shared_memory() == (9 * 4096, 5 * 4096)


def test_devices_that_this_process_may_not_open_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host.list_verbs_devices(tmp_path / "nowhere") == []
    for name in ("uverbs1", "uverbs0", "rdma_cm"):
        put(tmp_path / name, "")

    def access(path: Path, how: int) -> bool:
        assert how == os.R_OK | os.W_OK
        return path.name == "uverbs1"

    monkeypatch.setattr(host.os, "access", access)
    assert host.list_verbs_devices(tmp_path) == [("uverbs0", False), ("uverbs1", True)]


def test_facts_of_a_port_that_sysfs_lacks_are_unknown_and_never_well(tmp_path: Path) -> None:
    make_device(tmp_path, "mlx5_0", [V2_MAPPED, V2_LOCAL])
    folder, port = tmp_path / "mlx5_0", tmp_path / "mlx5_0/ports/1"
    for name in ("ports/1/state", "ports/1/phys_state", "ports/1/rate"):
        unreadable(folder / name)
    unreadable(port / "link_layer")
    unreadable(port / "gid_attrs/types/0")
    (port / "gid_attrs/ndevs/0").unlink()
    for index, text in ((2, "fe80:0000:0000:0000:0000:0000:0000:0000"), (3, "none"), (4, "")):
        put(port / "gids" / str(index), text)
    unreadable(port / "gids" / "5")
    put(port / "gids" / "no number", V2_MAPPED[0])
    (tmp_path / "bare").mkdir()
    bare, device = rdma.read_devices(tmp_path) or ()
    assert (bare.ports, bare.pci, bare.numa_node) == ((), None, None)
    (found,) = device.ports
    said = (found.state, found.physical_state, found.rate, found.link_layer)
    assert said == (None, None, None, None)
    assert not found.active and not found.usable
    assert {gid.index: (gid.type, gid.netdev) for gid in found.gids} == {
        0: (None, None),
        1: ("RoCE v2", "eth1"),
    }
    assert rdma.list_ports(None) == [] and rdma.list_ports([bare, device]) == [found]


@pytest.mark.parametrize(
    ("target", "pci"), [("0000:1b:00.0", "0000:1b:00.0"), ("virtual", None), (None, None)]
)
def test_the_address_of_a_card_is_that_of_its_folder(
    target: str | None, pci: str | None, tmp_path: Path
) -> None:
    make_device(tmp_path / "class", "mlx5_0", [])
    if target is not None:
        (tmp_path / target).mkdir()
        (tmp_path / "class/mlx5_0/device").symlink_to(tmp_path / target)
    (device,) = rdma.read_devices(tmp_path / "class") or ()
    assert device.pci == pci


def two_nodes(root: Path) -> Path:
    put(root / "node0" / "cpulist", "0-3,8")
    put(root / "node1" / "cpulist", "4-7")
    put(root / "has_cpu", "0-1")
    return root


def test_a_process_far_from_its_devices_is_shown_where_to_run(tmp_path: Path) -> None:
    put(tmp_path / "status", "Name:\tx\nMems_allowed_list:\t0-1")
    near = {"mlx5_0": 0, "mlx5_1": 1, "GPU 0": 1, "mlx5_2": None}

    def lines(processors: set[int], memory: str = "0-1") -> list[Check]:
        put(tmp_path / "status", f"Name:\tx\nMems_allowed_list:\t{memory}")
        found = numa.read_numa_topology(
            near,
            nodes=two_nodes(tmp_path / "nodes"),
            status=tmp_path / "status",
            processors=frozenset(processors),
        )
        return [c for c in run_checks(facts([], numa=found)) if c.name.startswith("NUMA")]

    everywhere = lines({1, 5})
    assert [c.verdict for c in everywhere] == ["ok", "ok", "ok", "ok", "unavailable"]
    assert line(everywhere, "NUMA nodes").found == "2; this process may run on 0, 1"
    first = lines({0, 8})
    assert line(first, "NUMA node of mlx5_0").verdict == "ok"
    for device in ("mlx5_1", "GPU 0"):
        far = line(first, f"NUMA node of {device}")
        assert far.verdict == "warning"
        assert "--cpunodebind=1 --membind=1" in far.advice
        assert "topologyManagerPolicy" in far.advice
    no_memory = lines({0, 4}, memory="0")
    assert line(no_memory, "NUMA node of mlx5_1").verdict == "warning"


def test_one_node_and_no_nodes_need_no_word(tmp_path: Path) -> None:
    put(tmp_path / "nodes" / "node0" / "cpulist", "0-7")
    one = numa.read_numa_topology(
        {"mlx5_0": None}, nodes=tmp_path / "nodes", processors=frozenset({0})
    )
    assert one is not None and one.own_nodes == {0}
    none = numa.read_numa_topology({}, nodes=tmp_path / "nowhere")
    for found in (one, none):
        assert not [c for c in run_checks(facts([], numa=found)) if c.name.startswith("NUMA")]


@pytest.mark.parametrize(
    ("status", "memory"), [("Name:\tx", None), (None, None), ("Mems_allowed_list:\t1", {1})]
)
def test_unknown_facts_of_nodes_exclude_none(
    status: str | None, memory: set[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa.os, "sched_getaffinity", lambda _: {0})
    nodes, file = two_nodes(tmp_path / "nodes"), tmp_path / "status"
    unreadable(nodes / "node2" / "cpulist")
    put(nodes / "node3x" / "cpulist", "0")
    if status is None:
        unreadable(file)
    else:
        put(file, status)
    found = numa.read_numa_topology({}, nodes=nodes, status=file)
    assert dict(found.nodes) == {0: {0, 1, 2, 3, 8}, 1: {4, 5, 6, 7}, 2: frozenset()}
    assert (found.processors, found.memory_nodes, found.own_nodes) == ({0}, memory, {0})
    assert [found.is_far_from(node) for node in range(3)] == [memory is not None, True, True]
    assert numa.read_numa_topology({}, nodes=tmp_path / "nowhere") is None


def test_the_node_of_a_device(tmp_path: Path) -> None:
    make_device(tmp_path, "mlx5_0", [])
    make_device(tmp_path, "rxe0", [])
    put(tmp_path / "mlx5_0" / "device" / "numa_node", 1)
    assert [d.numa_node for d in rdma.read_devices(tmp_path) or ()] == [1, None]
    for text in (-1, "", "near"):
        put(tmp_path / "mlx5_0" / "device" / "numa_node", text)
        assert [d.numa_node for d in rdma.read_devices(tmp_path) or ()] == [None, None]
    unreadable(tmp_path / "mlx5_0" / "device" / "numa_node")
    assert [d.numa_node for d in rdma.read_devices(tmp_path) or ()] == [None, None]


@pytest.mark.parametrize(
    ("text", "found"),
    [("0-2,8\n", {0, 1, 2, 8}), ("3", {3}), ("", set()), ("x", set()), ("1-", set())],
)
def test_lists_of_processors(text: str, found: set[int]) -> None:
    assert numa.parse_cpu_list(text) == found


def pyverbs_modules(monkeypatch: pytest.MonkeyPatch, get_device_list: Any) -> None:
    """Fake of pyverbs: gives its answers without a device."""

    class PyverbsError(Exception):
        pass

    class Context:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> Context:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def query_device(self) -> Any:
            return types.SimpleNamespace(phys_port_cnt=2)

        def query_port(self, port: int) -> Any:
            return types.SimpleNamespace(active_mtu=3 if port == 1 else 5)

    package, device = types.ModuleType("pyverbs"), types.ModuleType("pyverbs.device")
    error = types.ModuleType("pyverbs.pyverbs_error")
    error.PyverbsError = PyverbsError  # type: ignore[attr-defined]
    device.Context = Context  # type: ignore[attr-defined]
    device.get_device_list = lambda: get_device_list(PyverbsError)  # type: ignore[attr-defined]
    for module in (package, device, error):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_pyverbs_gives_the_mtu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pyverbs_modules(monkeypatch, lambda _: [types.SimpleNamespace(name=b"mlx5_0")])
    seen = verbs.probe_verbs(tmp_path)
    assert seen.pyverbs
    assert seen.mtus == {("mlx5_0", 1): 1024, ("mlx5_0", 2): 4096}
    make_device(tmp_path, "mlx5_0", [V2_MAPPED])
    make_device(tmp_path, "mlx5_1", [V2_MAPPED])
    found = verbs.add_active_mtus(rdma.read_devices(tmp_path), seen) or []
    assert [d.ports[0].active_mtu for d in found] == [1024, None]
    lines = run_checks(facts(found))
    assert "MTU 1024" in line(lines, "port mlx5_0/1").found
    assert "MTU unavailable" in line(lines, "port mlx5_1/1").found


def test_pyverbs_that_raises_because_the_kernel_has_no_infiniband(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(error: type[Exception]) -> None:
        raise error("Failed to get devices list")

    pyverbs_modules(monkeypatch, refuse)
    assert verbs.probe_verbs(tmp_path).mtus == {}
    assert verbs.add_active_mtus(None, verbs.probe_verbs(tmp_path)) is None


def test_missing_pyverbs_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    monkeypatch.setitem(sys.modules, "pyverbs.device", None)
    for _ in range(2):
        seen = verbs.probe_verbs(tmp_path)
        assert not seen.pyverbs
        assert seen.pyverbs_error
        assert str(tmp_path) not in sys.path
        # The distribution's, which cannot be imported either.
        put(tmp_path / "pyverbs" / f"device.{sys.implementation.cache_tag}-x.so", "")


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_device(tmp_path, "mlx5_0", [V2_MAPPED], counters={"counters/link_downed": 1})
    make_device(tmp_path, "mlx5_1", [], state="1: DOWN")
    found = facts(rdma.read_devices(tmp_path))
    monkeypatch.setattr(doctor, "gather_facts", lambda: found)
    assert main(["doctor", "--require", "rdma", "--output", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"]
    assert said["devices"][0]["ports"][0]["counters"] == {"link_downed": 1}
    assert said["devices"][1]["ports"][0]["counters"] == "unavailable"
    assert {c["verdict"] for c in said["checks"]} <= {"ok", "warning", "absent", "unavailable"}

    assert main(["doctor", "--require", "rdma", "--require", "gpu"]) == 1
    text = capsys.readouterr().out
    assert text.rstrip().endswith("missing: GPUs")
    assert "ok           RDMA devices" in text
    assert max(map(len, text.splitlines())) <= 100, "a pod's log is read as it is"
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--require", "wings"])


@pytest.mark.full
def test_on_this_very_host(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever it has: every line is filled in, and the trainer answers from its own process."""
    status = main(["doctor", "--require", "engine", "--output", "json"])
    said = json.loads(capsys.readouterr().out)
    names = {c["name"] for c in said["checks"]}
    assert {"RDMA devices", "locked memory", "transfer engine", "GPUs"} <= names
    (engine,) = [c for c in said["checks"] if c["name"] == "transfer engine"]
    assert (engine["verdict"] == "ok") == (status == 0)
    assert "cannot be queried" not in engine["found"]
    assert all(c["found"] for c in said["checks"])
