"""Prometheus's own checker of rules, from Debian's package."""

import shutil
import tempfile
from pathlib import Path

from testbed import tools
from testbed.errors import TestbedError
from testbed.processes import output, run


def find() -> Path:
    """promtool on PATH, or unpacked into the cache. Raises TestbedError with what to do."""
    if found := shutil.which("promtool"):
        return Path(found)
    program = tools.cache_root() / "prometheus" / "promtool"
    if not program.exists():
        _unpack(program)
    return program


def _unpack(program: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise TestbedError(
            "found no promtool on PATH and no apt-get to fetch it with: install Prometheus"
        )
    program.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=program.parent) as folder:
        download = ["sh", "-c", f"cd {folder} && apt-get -q download prometheus"]
        if run(download, deadline=300).returncode != 0:  # without package lists, or with old ones
            output(["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300", "update"], deadline=300)
            output(download, deadline=300)
        (package,) = Path(folder).glob("*.deb")
        output(["dpkg-deb", "--extract", str(package), folder], deadline=120)
        (Path(folder) / "usr/bin/promtool").replace(program)
