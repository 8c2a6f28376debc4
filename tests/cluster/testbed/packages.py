"""What a testbed needs of the machine, by Debian package."""

import fcntl
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from testbed.errors import TestbedError
from testbed.processes import output, run

LISTS_LOCK = Path("/var/lib/apt/lists/lock")


def need(programs: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Install what is missing if this is root on Debian, and refuse any other machine.

    `programs`: the path of a program, library or file, and the Debian package that brings it.
    Raises TestbedError with what is missing and where it would be.
    """
    missing = {program: package for program, package in programs.items() if not _found(program)}
    if not missing:
        return
    packages = sorted(set(missing.values()))
    if not can_install():
        raise TestbedError(
            f"found no {', '.join(sorted(missing))}: install them (on Debian they are in the "
            f"packages {' '.join(packages)})"
        )
    install(packages, say)
    still = sorted(program for program in missing if not _found(program))
    if still:
        raise TestbedError(f"installed {' '.join(packages)}, but found no {', '.join(still)}")


def can_install() -> bool:
    """Whether this is root on Debian or a relative of it."""
    return shutil.which("apt-get") is not None and os.geteuid() == 0


def install(packages: Sequence[str], say: Callable[[str], None]) -> None:
    """Install Debian packages. Raises TestbedError with what apt says."""
    say(f"installing {' '.join(packages)}")
    apt = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=300"]
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    _update_lists([*apt, "update"], quiet)
    command = [*apt, "install", "--yes", "--no-install-recommends", *packages]
    output(command, environment=quiet, deadline=600)


def _update_lists(command: list[str], environment: Mapping[str, str]) -> None:
    """apt's timeout is not for the lock of the package lists, which a timer of the machine or
    another lane of tests may hold."""
    for _ in range(5):
        with LISTS_LOCK.open("a") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)  # returns when nobody has it
        done = run(command, environment=environment, deadline=300)
        if done.returncode == 0 or str(LISTS_LOCK) not in done.stderr:
            break
    if done.returncode != 0:
        raise TestbedError(
            f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}"
        )


def _found(program: str) -> bool:
    path = Path(program)
    if path.exists():
        return True
    if path.suffix == ".so":
        # Providers of libibverbs carry its ABI's number in their names.
        return any(path.parent.glob(path.name.split("-")[0] + "-*.so"))
    # Distributions differ in where they put a program.
    return shutil.which(path.name) is not None
