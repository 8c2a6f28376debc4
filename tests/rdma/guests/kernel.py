"""The guests' kernel, its modules and a first ramdisk, kept in ~/.cache/pipemorph/linux/<version>.

Debian's own kernel: it has Soft-RoCE and netem as modules, which kernels of small virtual machines
mostly leave out. The package is unpacked, not installed.
"""

import fcntl
import gzip
import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from testbed import packages
from testbed.errors import TestbedError
from testbed.processes import output
from testbed.tools import cache_root

Say = Callable[[str], None]

# Minor releases of this line appear with every security update; the newest that apt has is taken.
LINE = "6.1"

# A program or file the guests need, and the Debian package that brings it.
_NEEDED = {
    "/usr/bin/qemu-system-x86_64": "qemu-system-x86",
    "/usr/bin/rdma": "iproute2",
    "/usr/sbin/tc": "iproute2",
    "/usr/lib/x86_64-linux-gnu/libibverbs.so.1": "libibverbs1",
    "/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so": "ibverbs-providers",
    "/usr/include/infiniband/verbs.h": "libibverbs-dev",
    "/usr/bin/ib_write_bw": "perftest",
    "/usr/lib/python3/dist-packages/pyverbs/__init__.py": "python3-pyverbs",
    "/bin/busybox": "busybox-static",
    "/sbin/modprobe": "kmod",
}

# Loaded by the ramdisk before there is a root; in this order.
_BOOT_MODULES = (
    "virtio_ring", "virtio", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci",
    "netfs", "fscache", "9pnet", "9pnet_virtio", "9p", "virtio_console",
)  # fmt: skip

_INIT = """#!/bin/sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
for m in {modules}; do /bin/busybox insmod /modules/$m.ko || echo "no $m"; done
/bin/busybox mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=512000,cache=loose host /root \
    || {{ echo "guest: cannot mount the host's files"; /bin/busybox poweroff -f; }}
for d in proc sys; do /bin/busybox mount --move /$d /root/$d; done
/bin/busybox mount -t devtmpfs dev /root/dev
/bin/busybox mkdir -p /root/dev/shm
for d in run dev/shm; do /bin/busybox mount -t tmpfs tmpfs /root/$d; done
exec /bin/busybox chroot /root {agent}
"""


@dataclass(frozen=True)
class Kernel:
    version: str
    image: Path
    ramdisk: Path
    # Holds lib/modules/<version>; the guests see it over 9p.
    root: Path


def missing_for_guests(say: Say) -> None:
    """Refuse a machine that cannot run the guests; install what root on Debian can install."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise TestbedError(
            f"found {sys.platform} on {os.uname().machine}, and the guests need Linux on x86_64"
        )
    packages.need(_NEEDED, say)


def fetched(say: Say) -> Path:
    """The unpacked kernel package, fetched if it is not cached."""
    folder = cache_root() / "linux"
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        return _cached(folder) or _fetch(folder, say)


def kernel(say: Say, init: str) -> Kernel:
    """The kernel with a ramdisk that ends in `init`."""
    root = fetched(say)
    release = next((root / "lib/modules").iterdir()).name
    return Kernel(release, root / f"boot/vmlinuz-{release}", _ramdisk(root, release, init), root)


def _cached(folder: Path) -> Path | None:
    done = [p.parent for p in folder.glob(f"{LINE}.*/complete")]
    return max(done, key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)], default=None)


def _fetch(folder: Path, say: Say) -> Path:
    said = output(["apt-cache", "depends", "linux-image-amd64"])
    found = re.search(rf"Depends: (linux-image-{re.escape(LINE)}\S*-amd64)", said)
    if found is None:
        raise TestbedError(
            f"apt's linux-image-amd64 is not of line {LINE} (it says: {said.strip()}); "
            "run `apt-get update`, or unpack such a package below "
            f"{folder}/<version> and touch <version>/complete"
        )
    package = found.group(1)
    say(f"fetching {package} for the guests")
    work = folder / f"unpacking-{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        output(["sh", "-c", f"cd {work} && apt-get -q download {package}"], deadline=600)
        archive = next(work.glob("*.deb"))
        version = archive.name.split("_")[1]
        output(["dpkg", "-x", archive, work / "root"], deadline=300)
        archive.unlink()
        release = next((work / "root/lib/modules").iterdir()).name
        output(["depmod", "-b", work / "root", release], deadline=120)
        (work / "root/complete").touch()
        target = folder / version
        shutil.rmtree(target, ignore_errors=True)
        (work / "root").rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _ramdisk(root: Path, release: str, init: str) -> Path:
    """A cpio archive in the kernel's own format: small enough to be made for every boot."""
    modules = {p.stem: p for p in (root / "lib/modules" / release).rglob("*.ko")}
    missing = [name for name in _BOOT_MODULES if name not in modules]
    # Some lines have these built in.
    present = [name for name in _BOOT_MODULES if name not in missing]
    script = _INIT.format(modules=" ".join(present), agent=init)
    archive = _Cpio()
    for name in ("bin", "proc", "sys", "root", "modules"):
        archive.directory(name)
    archive.file("bin/busybox", Path("/bin/busybox").read_bytes())
    archive.link("bin/sh", "busybox")
    for name in present:
        archive.file(f"modules/{name}.ko", modules[name].read_bytes())
    archive.file("init", script.encode())
    path = root / f"ramdisk-{os.getpid()}.gz"
    path.write_bytes(gzip.compress(archive.done(), compresslevel=1))
    return path


class _Cpio:
    """The "newc" format, which the kernel unpacks."""

    def __init__(self) -> None:
        self._out = io.BytesIO()
        self._inode = 0

    def directory(self, name: str) -> None:
        self._entry(name, 0o040755, b"")

    def file(self, name: str, content: bytes) -> None:
        self._entry(name, 0o100755, content)

    def link(self, name: str, target: str) -> None:
        self._entry(name, 0o120777, target.encode())

    def done(self) -> bytes:
        self._entry("TRAILER!!!", 0, b"")
        return self._out.getvalue()

    def _entry(self, name: str, mode: int, content: bytes) -> None:
        self._inode += 1
        raw = name.encode() + b"\0"
        fields = (self._inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(raw), 0)
        self._out.write(b"070701" + b"".join(b"%08X" % field for field in fields) + raw)
        self._pad()
        self._out.write(content)
        self._pad()

    def _pad(self) -> None:
        self._out.write(b"\0" * (-self._out.tell() % 4))
