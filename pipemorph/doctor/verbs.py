"""Checks for libibverbs and pyverbs, and reads the active MTUs, which only verbs report.

pyverbs is part of the distribution's rdma-core (Debian: ``python3-pyverbs``). Virtual environments
do not include the distribution's packages, so its folder is searched too.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipemorph.doctor.rdma import RdmaDevice

DISTRIBUTION = Path("/usr/lib/python3/dist-packages")


@dataclass(frozen=True)
class VerbsSupport:
    """User-space libraries of RDMA that were found, and errors of the others."""

    library: bool
    """True if libibverbs.so.1, which the engine needs, can be loaded."""
    library_error: str | None
    pyverbs: bool
    pyverbs_error: str | None
    mtus: dict[tuple[str, int], int]
    """(device, port) → active MTU in bytes."""


def probe_verbs(distribution: Path = DISTRIBUTION) -> VerbsSupport:
    """Load both libraries, and read the active MTUs. Raises nothing."""
    library_error = pyverbs_error = None
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        library_error = str(error)
    mtus: dict[tuple[str, int], int] = {}
    try:
        module = _import_pyverbs_device(distribution)
    except ImportError as error:
        module, pyverbs_error = None, str(error)
    if module is not None:
        mtus = _read_active_mtus(module)
    return VerbsSupport(
        library_error is None, library_error, module is not None, pyverbs_error, mtus
    )


def add_active_mtus(
    devices: list[RdmaDevice] | None, verbs: VerbsSupport
) -> list[RdmaDevice] | None:
    """The devices, with the active MTUs that pyverbs reported."""
    if devices is None:
        return None
    return [
        replace(
            device,
            ports=tuple(
                replace(port, active_mtu=verbs.mtus.get((device.name, port.number)))
                for port in device.ports
            ),
        )
        for device in devices
    ]


def _import_pyverbs_device(distribution: Path) -> Any:
    """Import :mod:`pyverbs.device`. Raises ImportError."""
    try:
        return importlib.import_module("pyverbs.device")
    except ImportError:
        tag = sys.implementation.cache_tag
        if not any((distribution / "pyverbs").glob(f"device.{tag}*.so")):
            raise
    # Only for this import: the folder has other packages, in other versions.
    sys.path.append(str(distribution))
    try:
        importlib.invalidate_caches()
        return importlib.import_module("pyverbs.device")
    finally:
        sys.path.remove(str(distribution))


def _read_active_mtus(module: Any) -> dict[tuple[str, int], int]:
    """Active MTUs. Empty without InfiniBand support in the kernel (``get_device_list`` raises)."""
    error: type[Exception] = importlib.import_module("pyverbs.pyverbs_error").PyverbsError
    found: dict[tuple[str, int], int] = {}
    try:
        for device in module.get_device_list():
            name = device.name.decode()
            with module.Context(name=name) as context:
                for port in range(1, context.query_device().phys_port_cnt + 1):
                    # Enum value 1 is 256 bytes (IBV_MTU_256); each next value doubles it.
                    found[name, port] = 128 << int(context.query_port(port).active_mtu)
    except error:
        return found
    return found
