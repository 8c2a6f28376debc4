"""Prometheus, and its own checker of rules, from Debian's package."""

import shutil
import tempfile
from pathlib import Path

from testbed import tools
from testbed.errors import TestbedError
from testbed.processes import output, run

PROGRAMS = ("prometheus", "promtool")


def find(name: str = "promtool") -> Path:
    """One of :data:`PROGRAMS`, on PATH or unpacked into the cache. Raises TestbedError with what to
    do."""
    if found := shutil.which(name):
        return Path(found)
    cache = tools.cache_root() / "prometheus"
    if not (cache / name).exists():
        _unpack(cache)
    return cache / name


def _unpack(cache: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise TestbedError(
            "found no Prometheus on PATH and no apt-get to fetch it with: install Prometheus"
        )
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        download = ["sh", "-c", f"cd {folder} && apt-get -q download prometheus"]
        if run(download, deadline=300).returncode != 0:  # without package lists, or with old ones
            output(["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", "update"], deadline=300)
            output(download, deadline=300)
        (package,) = Path(folder).glob("*.deb")
        output(["dpkg-deb", "--extract", str(package), folder], deadline=120)
        for name in PROGRAMS:
            (Path(folder) / "usr/bin" / name).replace(cache / name)
