"""Debian packages: which are missing, how they are installed, and how one is only unpacked."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from testbed.errors import TestbedError
from testbed.processes import output
from testbed.steps import Say, run_step

LISTS_LOCK = Path("/var/lib/apt/lists/lock")
# Waits for another apt instead of failing. The lock of the package lists is not covered by it.
_APT = ("apt-get", "-q", "-o", "DPkg::Lock::Timeout=300")


@dataclass(frozen=True)
class Need:
    """Requirement of the machine, and the Debian packages that bring it."""

    packages: tuple[str, ...]
    is_there: Callable[[], bool]


def needs(files: Mapping[str, str]) -> tuple[Need, ...]:
    """The needs for programs, libraries or files, each given with its Debian package."""
    return tuple(Need((package,), partial(_found, file)) for file, package in files.items())


def missing_packages(wanted: Sequence[Need]) -> list[str]:
    """Missing Debian packages, each once, sorted."""
    return sorted({p for need in wanted if not need.is_there() for p in need.packages})


def can_install() -> bool:
    """True if this is root on Debian or a relative of it."""
    return shutil.which("apt-get") is not None and os.geteuid() == 0


def install_words(names: Sequence[str]) -> list[str]:
    """The words after `apt-get` of the command that installs packages."""
    return ["install", "--yes", "--no-install-recommends", *names]


def install(names: Sequence[str], log: Path, say: Say, end: float) -> None:
    """Install packages in one transaction. Raises TestbedError with apt's message."""
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    with LISTS_LOCK.open("a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)  # a timer of the machine may hold it
    run_step("apt-get update", [*_APT, "update"], log, say, end, environment=quiet)
    say(f"apt-get {' '.join(install_words(names))}")
    title = f"installing {len(names)} Debian packages"
    run_step(title, [*_APT, *install_words(names)], log, say, end, environment=quiet)


class PackageSource:
    """apt with lists of its own in a folder: it needs no root and changes nothing of the machine.

    `architecture`: that of the packages, as Debian calls it; the machine's own if None.
    """

    def __init__(self, folder: Path, architecture: str | None = None) -> None:
        self.folder = folder
        options = {
            "Dir::State::Lists": f"{folder}/lists",
            "Dir::Cache": f"{folder}/cache",
            "Dir::State::status": "/dev/null",
            # As root, apt would download as a user who cannot write into the folder.
            "APT::Sandbox::User": "root",
        }
        if architecture is not None:
            options |= {"APT::Architecture": architecture, "APT::Architectures": architecture}
        self._options = [
            word for name, value in options.items() for word in ("-o", f"{name}={value}")
        ]

    def update(self, say: Say, end: float) -> None:
        """Read the package lists. Raises TestbedError without apt."""
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            raise TestbedError("found no apt-get and dpkg-deb, and packages come from Debian")
        for part in ("lists/partial", "cache/archives/partial"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        command = ["apt-get", "-q", *self._options, "update"]
        run_step("reading Debian's package lists", command, self.folder / "log", say, end)

    def dependencies(self, package: str) -> str:
        """Dependencies of a package, by `apt-cache depends`."""
        return output(["apt-cache", *self._options, "depends", package])

    def unpack(self, package: str, target: Path, say: Say, end: float) -> str:
        """Unpack a package into a folder, without installation; returns its version."""
        with tempfile.TemporaryDirectory(dir=self.folder) as work:
            # apt downloads into the working directory.
            script = 'cd "$0" && exec "$@"'
            download = ["apt-get", "-q", *self._options, "download", package]
            run_step(
                f"downloading {package}",
                ["sh", "-c", script, work, *download],
                self.folder / "log",
                say,
                end,
            )
            (archive,) = Path(work).glob("*.deb")
            output(["dpkg-deb", "--extract", archive, target], deadline=300)
            return archive.name.split("_")[1]


def _found(program: str) -> bool:
    path = Path(program)
    if path.exists():
        return True
    if path.suffix == ".so":
        # Providers of libibverbs carry its ABI's number in their names.
        return any(path.parent.glob(path.name.split("-")[0] + "-*.so"))
    # Distributions differ in where they put a program.
    return shutil.which(path.name) is not None
