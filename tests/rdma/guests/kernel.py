"""The guests' kernel, modules and a first ramdisk, cached in ~/.cache/pipemorph/linux/<version>.

Debian's own kernel: it has Soft-RoCE and netem as modules, which kernels of small virtual machines
mostly lack. `make testbeds` unpacks it.
"""

import gzip
import io
import os
from dataclasses import dataclass
from pathlib import Path

from testbed.tools import not_ready
from testbed.unpacked import find_kernel

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


def kernel(init: str) -> Kernel:
    """The kernel with a ramdisk that ends in `init`. Raises TestbedError if it is not unpacked."""
    root = find_kernel()
    if root is None:
        raise not_ready("guests", "their kernel is not unpacked")
    release = next((root / "lib/modules").iterdir()).name
    return Kernel(release, root / f"boot/vmlinuz-{release}", _ramdisk(root, release, init), root)


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
