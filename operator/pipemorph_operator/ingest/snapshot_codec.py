"""A controller's snapshot as status holds it: JSON, zlib, base64.

A plan is a few letters repeated a few thousand times: packed, even one of hundreds of stages
stays far below what an API object may weigh, and a status stays readable.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from pipemorph.api.spec import JobSpec
from pipemorph.api.status import ControlState
from pipemorph.control import JobController
from pipemorph.errors import InputError
from pipemorph.wire import LinkHealthReport

MAX_PACKED = 512 * 1024
"""Leaves room for the rest of an object in etcd's 1.5 MiB."""
MAX_UNPACKED = 64 << 20


class TooLarge(Exception):
    """The snapshot does not fit into an API object."""


def pack(snapshot: Mapping[str, Any]) -> ControlState:
    """Raises :class:`TooLarge`."""
    raw = json.dumps(snapshot, separators=(",", ":")).encode()
    packed = base64.b64encode(zlib.compress(raw, 6)).decode()
    if len(packed) > MAX_PACKED:
        raise TooLarge(
            f"the plan takes {len(packed)} bytes packed; at most {MAX_PACKED} fit into status"
        )
    return ControlState(
        attempt=snapshot["attempt"], plan_version=snapshot["plan_version"], snapshot=packed
    )


def unpack(state: ControlState) -> dict[str, Any]:
    """Raises ValueError if it is damaged."""
    try:
        packed = base64.b64decode(state.snapshot, validate=True)
        raw = zlib.decompressobj().decompress(packed, MAX_UNPACKED)
        found = json.loads(raw)
    except (binascii.Error, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    return found


def restore(
    spec: JobSpec,
    state: ControlState | None,
    attempt: int,
    on_report: Callable[[LinkHealthReport], None],
) -> tuple[JobController, str]:
    """A controller for an attempt that goes on where ``state`` was saved, and what was wrong
    with it, if anything. Its plan version is never below the saved one, damaged or not."""
    if state is None:
        return JobController(spec, attempt=attempt, on_report=on_report), ""
    problem = ""
    try:
        controller = JobController.restore(spec, unpack(state), on_report=on_report)
    except (ValueError, InputError) as error:
        problem = f"the saved control state is unusable, only its plan version is kept: {error}"
        bare = {"attempt": state.attempt, "plan_version": state.plan_version, "sequence": 0}
        controller = JobController.restore(spec, bare, on_report=on_report)
    if attempt > controller.attempt:
        controller.begin_attempt(attempt)
    return controller, problem
