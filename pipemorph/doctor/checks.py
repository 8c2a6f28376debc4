"""The checks of `pipemorph doctor`: each has a finding, a verdict and advice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pipemorph.doctor import host
from pipemorph.doctor.numa import NumaTopology
from pipemorph.doctor.rdma import RdmaDevice, RdmaPort, list_ports
from pipemorph.doctor.verbs import VerbsSupport
from pipemorph.extras import format_install_command

Need = Literal["engine", "gpu", "rdma"]
NEEDS: tuple[Need, ...] = ("engine", "gpu", "rdma")
Verdict = Literal["ok", "warning", "missing", "absent", "unavailable"]
"""``missing``: absent but required; ``unavailable``: cannot be determined here."""
UNAVAILABLE = "unavailable"
LEAST_SHARED_MEMORY = 1 << 30
GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True)
class Check:
    """Line of the doctor's table."""

    name: str
    found: str
    verdict: Verdict
    advice: str = ""


@dataclass(frozen=True)
class HostFacts:
    """The input of the checks. ``trainer`` is None if the trainer cannot be queried."""

    devices: list[RdmaDevice] | None
    verbs: VerbsSupport
    uverbs: list[tuple[str, bool]]
    locked_bytes: int
    may_lock: bool
    huge_pages: list[host.HugePages] | None
    transparent_huge_pages: str | None
    shared_memory: tuple[int, int] | None
    modules: list[str] | None
    trainer: dict[str, Any] | None
    trainer_error: str | None
    numa: NumaTopology | None = None


def run_checks(facts: HostFacts, required: frozenset[Need] = frozenset()) -> list[Check]:
    """Run all checks, those of RDMA first."""
    rdma = "rdma" in required
    lacking: Verdict = "missing" if rdma else "absent"
    return [
        *_check_devices(facts.devices, lacking, rdma),
        *_check_verbs_access(facts, lacking),
        _check_locked_memory(facts, lacking if facts.devices or rdma else "warning"),
        _check_huge_pages(facts),
        _check_shared_memory(facts.shared_memory),
        *_check_numa_nodes(facts.numa),
        _check_modules(facts.modules),
        *_check_trainer(facts, required),
    ]


def _check_devices(found: list[RdmaDevice] | None, lacking: Verdict, rdma: bool) -> Iterator[Check]:
    if not found:
        what = "the kernel has no InfiniBand" if found is None else "the kernel shows no device"
        yield Check(
            "RDMA devices",
            f"none: {what}",
            lacking,
            "links use TCP or shared memory; for RDMA load the NIC's driver, or in a pod request"
            " the device plugin's resource (placement.rdma.resourceName)",
        )
        return
    cards = {device.pci or device.name for device in found}
    names = ", ".join(f"{d.name} ({d.pci or 'software'})" for d in found)
    usable = [port for port in list_ports(found) if port.usable]
    yield Check(
        "RDMA devices",
        f"{names}; {len(usable)} usable ports on {len(cards)} cards",
        "ok" if usable else lacking,
        "" if usable else "no port is active with a routable RoCE v2 GID; see the lines below",
    )
    for port in list_ports(found):
        # One usable port is enough for a job; problems of the others are warnings.
        yield from _check_port(port, "warning" if usable or not rdma else "missing")


def _check_port(port: RdmaPort, lacking: Verdict) -> Iterator[Check]:
    mtu = f"MTU {port.active_mtu}" if port.active_mtu else f"MTU {UNAVAILABLE}"
    state = " ".join(filter(None, (port.state, port.physical_state))) or UNAVAILABLE
    yield Check(
        f"port {port}",
        ", ".join(filter(None, (state, port.link_layer, port.rate, mtu))),
        "ok" if port.active else lacking,
        "" if port.active else "check cable, switch port and `ip link`",
    )
    if port.link_layer != "InfiniBand":
        yield _check_gids(port, lacking)
    yield _check_counters(port)


def _check_gids(port: RdmaPort, lacking: Verdict) -> Check:
    name = f"port {port} GIDs"
    if not port.gids:
        return Check(
            name, "none", lacking, "give the interface an address; in a pod, a secondary network"
        )
    best = port.gids[0]
    found = (
        f"best is index {best.index}: {best.display_address}, "
        f"{best.type or f'type {UNAVAILABLE}'}, {best.netdev or 'no interface'} ({best.kind}); "
        f"{len(port.gids)} in all"
    )
    if best.kind == "link-local":
        return Check(
            name, found, lacking, "the best is link-local: give the interface a routable address"
        )
    if best.type != "RoCE v2":
        return Check(name, found, lacking, "RoCE v1 is not routed: enable RoCE v2 on the device")
    return Check(name, found, "ok")


def _check_counters(port: RdmaPort) -> Check:
    name = f"port {port} counters"
    read = {counter: n for counter, n in port.counters.items() if n is not None}
    if not read:
        return Check(
            name,
            UNAVAILABLE,
            "unavailable",
            "health then depends on in-band measurements only; pods often cannot read counters",
        )
    found = ", ".join(f"{counter} {n}" for counter, n in read.items() if n) or "all 0"
    unread = [counter for counter, n in port.counters.items() if n is None]
    if unread:
        found += f"; {UNAVAILABLE}: {', '.join(unread)}"
    return Check(name, f"{len(read)} read: {found}", "ok")


def _check_verbs_access(facts: HostFacts, lacking: Verdict) -> Iterator[Check]:
    usable = [name for name, allowed in facts.uverbs if allowed]
    denied = [name for name, allowed in facts.uverbs if not allowed]
    if usable:
        yield Check("verbs devices", ", ".join(usable), "ok")
    elif denied:
        yield Check(
            "verbs devices",
            f"no access to {', '.join(denied)}",
            lacking,
            "let this user read and write /dev/infiniband/uverbs*",
        )
    else:
        yield Check(
            "verbs devices",
            "none in /dev/infiniband",
            lacking,
            "load ib_uverbs; in a pod request the device plugin's resource",
        )
    verbs = facts.verbs
    yield Check(
        "libibverbs",
        "can be loaded" if verbs.library else f"cannot be loaded: {verbs.library_error}",
        "ok" if verbs.library else lacking,
        "" if verbs.library else "install it and the providers (Debian: ibverbs-providers)",
    )
    yield Check(
        "pyverbs",
        "can be imported" if verbs.pyverbs else f"cannot be imported: {verbs.pyverbs_error}",
        "ok" if verbs.pyverbs else "absent",
        "" if verbs.pyverbs else "needed only to show the MTU (Debian: python3-pyverbs)",
    )


def _check_locked_memory(facts: HostFacts, lacking: Verdict) -> Check:
    limit = "unlimited" if facts.locked_bytes == host.UNLIMITED else format_size(facts.locked_bytes)
    found = f"limit {limit}" + (", lifted by CAP_IPC_LOCK" if facts.may_lock else "")
    if host.is_locked_memory_enough(facts.locked_bytes, facts.may_lock):
        return Check("locked memory", found, "ok")
    return Check(
        "locked memory",
        found,
        lacking,
        f"RDMA locks {format_size(host.LEAST_LOCKED_BYTES)} of memory or more: raise `ulimit -l`,"
        " or LimitMEMLOCK of the container runtime (Kubernetes has no field for it, and IPC_LOCK"
        " has no effect for users other than root)",
    )


def _check_huge_pages(facts: HostFacts) -> Check:
    explicit = [p for p in facts.huge_pages or () if p.total]
    found = [f"{p.free} of {p.total} free of {format_size(p.page_bytes)}" for p in explicit]
    if facts.transparent_huge_pages:
        found.append(f"transparent: {facts.transparent_huge_pages}")
    if facts.huge_pages is None and not found:
        return Check("huge pages", UNAVAILABLE, "unavailable")
    fine = bool(explicit) or facts.transparent_huge_pages in ("always", "madvise")
    return Check(
        "huge pages",
        "; ".join(found) or "none",
        "ok" if fine else "warning",
        "" if fine else "slots use small pages: set transparent_hugepage/enabled to madvise",
    )


def _check_shared_memory(found: tuple[int, int] | None) -> Check:
    if found is None:
        return Check("/dev/shm", "not mounted", "warning", "mount a tmpfs for data loaders")
    total, free = found
    fine = total >= LEAST_SHARED_MEMORY
    return Check(
        "/dev/shm",
        f"{format_size(total)}, {format_size(free)} free",
        "ok" if fine else "warning",
        "" if fine else "data loaders of torch need more: placement.sharedMemory, or --shm-size",
    )


def _check_numa_nodes(found: NumaTopology | None) -> Iterator[Check]:
    if found is None or len(found.nodes) < 2:
        # One node, or unknown topology: nothing to check.
        return
    own = ", ".join(map(str, sorted(found.own_nodes)))
    yield Check("NUMA nodes", f"{len(found.nodes)}; this process may run on {own}", "ok")
    for device, node in found.devices.items():
        name = f"NUMA node of {device}"
        if node is None:
            yield Check(name, "unknown: the firmware does not report it", "unavailable")
        elif found.is_far_from(node):
            yield Check(
                name,
                f"{node}, where this process may not run or allocate memory",
                "warning",
                "all data crosses between NUMA nodes: start it there (`numactl --cpunodebind"
                f"={node} --membind={node}`); in Kubernetes set the kubelet's topologyManagerPolicy"
                " to best-effort or single-numa-node, with cpuManagerPolicy static",
            )
        else:
            yield Check(name, f"{node}; the engine keeps its threads and memory there", "ok")


def _check_modules(found: list[str] | None) -> Check:
    if found is None:
        return Check("kernel modules", UNAVAILABLE, "unavailable")
    return Check("kernel modules", ", ".join(found) or "none for RDMA or GPUs", "ok")


def _check_trainer(facts: HostFacts, required: frozenset[Need]) -> Iterator[Check]:
    def absence_verdict(need: Need) -> Verdict:
        return "missing" if need in required else "absent"

    trainer = facts.trainer
    if trainer is None:
        why = f"cannot be queried: {facts.trainer_error}"
        advice = format_install_command("trainer")
        yield Check("transfer engine", why, absence_verdict("engine"), advice)
        yield Check("GPUs", why, absence_verdict("gpu"), advice)
        return
    yield Check(
        "transfer engine",
        "built" if trainer["engine"] else "not built",
        "ok" if trainer["engine"] else absence_verdict("engine"),
        "" if trainer["engine"] else "links stay direct; install from source with a C++ compiler",
    )
    gpus = [f"{g['name']} ({format_size(g['bytes'])}, {g['pci']})" for g in trainer["gpus"]]
    yield Check(
        "GPUs",
        ", ".join(gpus) or f"torch {trainer['torch']} sees none",
        "ok" if gpus else absence_verdict("gpu"),
        "" if gpus else "stages run on the CPU; in a pod request nvidia.com/gpu",
    )


def format_size(n: int) -> str:
    """``1073741824`` → ``"1 GiB"``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if n >= unit:
            return f"{n / unit:.4g} {name}"
    return f"{n} bytes"
