"""Debian packages that are unpacked below `~/.cache/pipemorph` and never installed.

Prometheus, the kernel of the RDMA guests, and libcrypto for an emulated aarch64.
"""

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed.errors import TestbedError
from testbed.packages import PackageSource
from testbed.processes import output
from testbed.steps import Say
from testbed.tools import cache_root, locked

PROMETHEUS = ("prometheus", "promtool")
# Minor releases of this line appear with every security update; the newest that apt has is taken.
KERNEL_LINE = "6.1"
AARCH64 = "aarch64-linux-gnu"


_updated: set[str | None] = set()


@contextmanager
def _source_locked(
    say: Say, end: float, architecture: str | None = None
) -> Iterator[PackageSource]:
    """The package lists of an architecture, read once by this process."""
    folder = cache_root() / f"apt-{architecture or 'native'}"
    source = PackageSource(folder, architecture)
    with locked(folder.with_suffix(".lock"), say, end - time.monotonic(), patient=False):
        if architecture not in _updated:
            source.update(say, end)
            _updated.add(architecture)
        yield source


def find_prometheus(name: str) -> Path | None:
    """Find one of :data:`PROMETHEUS`, on PATH or in the cache."""
    if found := shutil.which(name):
        return Path(found)
    path = cache_root() / "prometheus" / name
    return path if path.exists() else None


def unpack_prometheus(say: Say, end: float) -> None:
    folder = cache_root() / "prometheus"
    work = _emptied(folder / "unpacking")
    with _source_locked(say, end) as source:
        source.unpack("prometheus", work, say, end)
    for name in PROMETHEUS:
        (work / "usr/bin" / name).replace(folder / name)
    shutil.rmtree(work)


def find_kernel() -> Path | None:
    """The newest unpacked kernel package of :data:`KERNEL_LINE`."""
    done = [p.parent for p in (cache_root() / "linux").glob(f"{KERNEL_LINE}.*/complete")]
    return max(done, key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)], default=None)


def unpack_kernel(say: Say, end: float) -> None:
    folder = cache_root() / "linux"
    work = _emptied(folder / "unpacking")
    with _source_locked(say, end) as source:
        said = source.dependencies("linux-image-amd64")
        found = re.search(rf"Depends: (linux-image-{re.escape(KERNEL_LINE)}\S*-amd64)", said)
        if found is None:
            raise TestbedError(
                f"apt's linux-image-amd64 is not of line {KERNEL_LINE} (it says: {said.strip()}): "
                f"unpack such a package below {folder}/<version> and touch <version>/complete"
            )
        version = source.unpack(found.group(1), work, say, end)
    release = next((work / "lib/modules").iterdir()).name
    output(["depmod", "-b", work, release], deadline=120)
    (work / "complete").touch()
    shutil.rmtree(folder / version, ignore_errors=True)
    work.rename(folder / version)


def libcrypto_folder() -> Path:
    """The folder of libcrypto for aarch64, which no package for amd64 brings."""
    return cache_root() / AARCH64 / "root/usr/lib" / AARCH64


def has_libcrypto() -> bool:
    return (libcrypto_folder() / "libcrypto.so.3").exists()


def unpack_libcrypto(say: Say, end: float) -> None:
    folder = cache_root() / AARCH64
    work = _emptied(folder / "unpacking")
    with _source_locked(say, end, "arm64") as source:
        source.unpack("libssl3", work, say, end)
    shutil.rmtree(folder / "root", ignore_errors=True)
    work.rename(folder / "root")


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
