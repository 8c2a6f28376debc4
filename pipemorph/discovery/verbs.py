"""What only verbs know, through pyverbs and libibverbs where they are there.

pyverbs comes with the distribution's rdma-core (Debian: ``python3-pyverbs``); the sources on the
package index have to be compiled against it. A virtual environment does not see it, so its folder
is looked at, too.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipemorph.discovery.rdma import Device

DISTRIBUTION = Path("/usr/lib/python3/dist-packages")


@dataclass(frozen=True)
class Verbs:
    """What was found of the user-space half of RDMA. A reason where something was not."""

    library: bool
    """libibverbs.so.1 can be loaded, which is what the engine needs."""
    library_error: str | None
    pyverbs: bool
    pyverbs_error: str | None
    mtus: dict[tuple[str, int], int]
    """(device, port) → active MTU in bytes."""


def look(distribution: Path = DISTRIBUTION) -> Verbs:
    library_error = pyverbs_error = None
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        library_error = str(error)
    mtus: dict[tuple[str, int], int] = {}
    try:
        module = _pyverbs_device(distribution)
    except ImportError as error:
        module, pyverbs_error = None, str(error)
    if module is not None:
        mtus = _mtus(module)
    return Verbs(library_error is None, library_error, module is not None, pyverbs_error, mtus)


def with_mtus(devices: list[Device] | None, verbs: Verbs) -> list[Device] | None:
    """The same devices, with the active MTU of each port that pyverbs knew."""
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


def _pyverbs_device(distribution: Path) -> Any:
    """:mod:`pyverbs.device`. Raises ImportError."""
    try:
        return importlib.import_module("pyverbs.device")
    except ImportError:
        tag = sys.implementation.cache_tag
        if not any((distribution / "pyverbs").glob(f"device.{tag}*.so")):
            raise
    # For this one import only: the folder holds much else, of other versions than ours.
    sys.path.append(str(distribution))
    try:
        importlib.invalidate_caches()
        return importlib.import_module("pyverbs.device")
    finally:
        sys.path.remove(str(distribution))


def _mtus(module: Any) -> dict[tuple[str, int], int]:
    """Active MTUs. Empty where the kernel has no InfiniBand: ``get_device_list`` raises then."""
    error: type[Exception] = importlib.import_module("pyverbs.pyverbs_error").PyverbsError
    found: dict[tuple[str, int], int] = {}
    try:
        for device in module.get_device_list():
            name = device.name.decode()
            with module.Context(name=name) as context:
                for port in range(1, context.query_device().phys_port_cnt + 1):
                    # IBV_MTU_256 is 1, and every further one is twice as large.
                    found[name, port] = 128 << int(context.query_port(port).active_mtu)
    except error:
        return found
    return found
