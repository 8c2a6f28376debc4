"""Encodes a controller's snapshot for status: JSON, xz, base64.

Plans are repetitive text: compressed, those of the largest jobs stay below the size limit of an API
object, and status stays readable. xz sees what stages have in common over the whole of a plan.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import lzma
from collections.abc import Callable, Mapping
from typing import Any

from pipemorph.api.spec import JobSpec
from pipemorph.api.status import ControlState
from pipemorph.control import JobController
from pipemorph.errors import InputError
from pipemorph.wire import LinkHealthReport

MAX_PACKED = 768 * 1024
"""Leaves room for the rest of the object within etcd's limit of 1.5 MiB."""
LARGE = 256 * 1024
"""Bytes of text that are compressed in about 20 ms."""
MAX_UNPACKED = 64 << 20
_DICTIONARY = 64 << 10, 8 << 20
"""Least and largest, bytes. A larger one than the text is only memory to clear."""
MAX_MEMORY = 16 << 20
"""Bytes that the decoder may take, dictionary included."""


class TooLarge(Exception):
    """The snapshot does not fit into an API object."""


def pack(snapshot: Mapping[str, Any]) -> ControlState:
    """Encode a snapshot. Raises :class:`TooLarge`."""
    return _state(snapshot, _compress(_text(snapshot)))


async def pack_beside(snapshot: Mapping[str, Any]) -> ControlState:
    """:func:`pack`, with a large one compressed beside the event loop: that of the largest job
    takes over a second."""
    raw = _text(snapshot)
    large = len(raw) > LARGE
    return _state(snapshot, await asyncio.to_thread(_compress, raw) if large else _compress(raw))


def _text(snapshot: Mapping[str, Any]) -> bytes:
    return json.dumps(snapshot, separators=(",", ":")).encode()


def _compress(raw: bytes) -> str:
    """Base64 of the compressed bytes."""
    return base64.b64encode(lzma.compress(raw, filters=_filters(len(raw)))).decode()


def _state(snapshot: Mapping[str, Any], packed: str) -> ControlState:
    if len(packed) > MAX_PACKED:
        raise TooLarge(
            f"the plan takes {len(packed)} compressed bytes; status holds at most {MAX_PACKED}"
        )
    return ControlState(
        attempt=snapshot["attempt"], plan_version=snapshot["plan_version"], snapshot=packed
    )


def _filters(size: int) -> list[dict[str, int]]:
    least, largest = _DICTIONARY
    dictionary = min(max(size, least), largest)
    return [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": dictionary}]


def unpack(state: ControlState) -> dict[str, Any]:
    """Decode a snapshot. Raises ValueError if it is damaged."""
    try:
        packed = base64.b64decode(state.snapshot, validate=True)
        raw = lzma.LZMADecompressor(lzma.FORMAT_XZ, MAX_MEMORY).decompress(packed, MAX_UNPACKED)
        found = json.loads(raw)
    except (binascii.Error, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def in_use(state: ControlState | None) -> int:
    """The highest plan version that may be in use."""
    return max(state.reserved or 0, state.plan_version) if state is not None else 0


def restore(
    spec: JobSpec,
    state: ControlState | None,
    attempt: int,
    on_report: Callable[[LinkHealthReport], None],
) -> tuple[JobController, str]:
    """A controller for an attempt, restored from ``state``, and the problem with it, if any. Its
    plan version is never below the reserved ones, even if the state is damaged."""
    if state is None:
        return JobController(spec, attempt=attempt, on_report=on_report), ""
    problem = ""
    try:
        controller = JobController.restore(spec, unpack(state), on_report=on_report)
    except (ValueError, InputError) as error:
        problem = f"the saved control state is unusable; kept only its plan version: {error}"
        bare = {"attempt": state.attempt, "plan_version": state.plan_version, "sequence": 0}
        controller = JobController.restore(spec, bare, on_report=on_report)
    controller.skip_to(in_use(state))
    if attempt > controller.attempt:
        controller.begin_attempt(attempt)
    return controller, problem
