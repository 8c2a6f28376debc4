"""Limits and features of this host or pod that a job's links need."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from pipemorph.doctor.cgroup import CGROUPS, read_memory_limit

LEAST_LOCKED_BYTES = 1 << 30
"""Locked memory for the registered buffers of a stage; usual limits are 64 KiB to 8 MiB."""
UNLIMITED = resource.RLIM_INFINITY
_CAP_IPC_LOCK = 14

MODULES = (
    *("ib_core", "ib_uverbs", "rdma_cm", "rdma_ucm"),
    *("mlx5_ib", "mlx4_ib", "irdma", "bnxt_re", "efa", "erdma", "hns_roce", "rdma_rxe", "siw"),
    *("nvidia", "nvidia_peermem", "gdrdrv"),
)
"""Kernel modules that are checked: the RDMA core, its drivers, and those for GPUDirect."""


def usable_memory_bytes(root: Path = CGROUPS) -> int:
    """Memory that processes may use: the host's, or the limit of their control group."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = read_memory_limit(root)
    return memory if limit is None else min(memory, limit)


def read_locked_memory_limit() -> int:
    """Bytes of memory this process may lock; :data:`UNLIMITED` for no limit."""
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]


def has_ipc_lock(status: Path = Path("/proc/self/status")) -> bool:
    """True if this process has CAP_IPC_LOCK, which lifts the limit."""
    for line in status.read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return False


def is_locked_memory_enough(limit: int, capable: bool) -> bool:
    """True if ``limit`` bytes suffice, or CAP_IPC_LOCK (``capable``) lifts it."""
    return capable or limit == UNLIMITED or limit >= LEAST_LOCKED_BYTES


@dataclass(frozen=True)
class HugePages:
    """Explicit huge pages of a size."""

    page_bytes: int
    total: int
    free: int


def read_huge_pages(sysfs: Path = Path("/sys/kernel/mm/hugepages")) -> list[HugePages] | None:
    """Explicit huge pages by size. None if the kernel does not report them."""
    try:
        folders = sorted(sysfs.glob("hugepages-*kB"))
        if not folders:
            return None
        return [
            HugePages(
                page_bytes=int(folder.name.removeprefix("hugepages-").removesuffix("kB")) << 10,
                total=int((folder / "nr_hugepages").read_text()),
                free=int((folder / "free_hugepages").read_text()),
            )
            for folder in folders
        ]
    except (OSError, ValueError):
        return None


def read_transparent_huge_pages(
    path: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled"),
) -> str | None:
    """``always``, ``madvise`` or ``never``; None if the kernel does not support them."""
    try:
        text = path.read_text()
    except OSError:
        return None
    chosen = [word[1:-1] for word in text.split() if word.startswith("[")]
    return chosen[0] if chosen else None


def measure_shared_memory(path: Path = Path("/dev/shm")) -> tuple[int, int] | None:
    """Size and free bytes of /dev/shm. None if it is not mounted."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail


def list_loaded_modules(
    proc: Path = Path("/proc/modules"), sysfs: Path = Path("/sys/module")
) -> list[str] | None:
    """The :data:`MODULES` that are loaded or built in. None if the kernel reports neither."""
    try:
        loaded = {line.split()[0] for line in proc.read_text().splitlines()}
    except OSError:
        if not sysfs.is_dir():
            return None
        loaded = set()
    return [name for name in MODULES if name in loaded or (sysfs / name).is_dir()]


def list_verbs_devices(folder: Path = Path("/dev/infiniband")) -> list[tuple[str, bool]]:
    """The character devices of verbs, and whether this process may open them."""
    return [
        (path.name, os.access(path, os.R_OK | os.W_OK)) for path in sorted(folder.glob("uverbs*"))
    ]
