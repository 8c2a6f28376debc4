"""Encodes a controller's snapshot for status: JSON, zlib, base64.

Plans are repetitive text: compressed, even one of hundreds of stages is far below the size limit of
an API object, and status stays readable.
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
"""Leaves room for the rest of the object within etcd's limit of 1.5 MiB."""
MAX_UNPACKED = 64 << 20


class TooLarge(Exception):
    """The snapshot does not fit into an API object."""


def pack(snapshot: Mapping[str, Any]) -> ControlState:
    """Encode a snapshot. Raises :class:`TooLarge`."""
    raw = json.dumps(snapshot, separators=(",", ":")).encode()
    packed = base64.b64encode(zlib.compress(raw, 6)).decode()
    if len(packed) > MAX_PACKED:
        raise TooLarge(
            f"the plan takes {len(packed)} compressed bytes; status holds at most {MAX_PACKED}"
        )
    return ControlState(
        attempt=snapshot["attempt"], plan_version=snapshot["plan_version"], snapshot=packed
    )


def unpack(state: ControlState) -> dict[str, Any]:
    """Decode a snapshot. Raises ValueError if it is damaged."""
    try:
        packed = base64.b64decode(state.snapshot, validate=True)
        raw = zlib.decompressobj().decompress(packed, MAX_UNPACKED)
        found = json.loads(raw)
    except (binascii.Error, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def restore(
    spec: JobSpec,
    state: ControlState | None,
    attempt: int,
    on_report: Callable[[LinkHealthReport], None],
) -> tuple[JobController, str]:
    """A controller for an attempt, restored from ``state``, and the problem with it, if any. Its
    plan version is never below the saved one, even if the state is damaged."""
    if state is None:
        return JobController(spec, attempt=attempt, on_report=on_report), ""
    problem = ""
    try:
        controller = JobController.restore(spec, unpack(state), on_report=on_report)
    except (ValueError, InputError) as error:
        problem = f"the saved control state is unusable; kept only its plan version: {error}"
        bare = {"attempt": state.attempt, "plan_version": state.plan_version, "sequence": 0}
        controller = JobController.restore(spec, bare, on_report=on_report)
    if attempt > controller.attempt:
        controller.begin_attempt(attempt)
    return controller, problem
