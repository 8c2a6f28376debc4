"""Packs a controller's snapshot for an API object: JSON, xz, base64.

Plans are repetitive text: compressed, those of the largest jobs stay below the size limit of an API
object. xz sees what stages have in common over the whole of a plan.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import lzma
from collections.abc import Mapping
from typing import Any

from pipemorph.api.plan import MAX_PACKED

LARGE = 256 * 1024
"""Bytes of text that are compressed in about 20 ms."""
MAX_UNPACKED = 64 << 20
_DICTIONARY = 64 << 10, 8 << 20
"""Least and largest, bytes. A larger one than the text is only memory to clear."""
MAX_MEMORY = 16 << 20
"""Bytes that the decoder may take, dictionary included."""


class TooLarge(Exception):
    """The snapshot does not fit into an API object."""


def pack(snapshot: Mapping[str, Any]) -> str:
    """Encode a snapshot. Raises :class:`TooLarge`."""
    return _compress(_text(snapshot))


async def pack_beside(snapshot: Mapping[str, Any]) -> str:
    """:func:`pack`, with a large one compressed beside the event loop: that of the largest job
    takes over a second."""
    raw = _text(snapshot)
    return await asyncio.to_thread(_compress, raw) if len(raw) > LARGE else _compress(raw)


def _text(snapshot: Mapping[str, Any]) -> bytes:
    return json.dumps(snapshot, separators=(",", ":")).encode()


def _compress(raw: bytes) -> str:
    packed = base64.b64encode(lzma.compress(raw, filters=_filters(len(raw)))).decode()
    if len(packed) > MAX_PACKED:
        raise TooLarge(
            f"the plan takes {len(packed)} compressed bytes; an object holds at most {MAX_PACKED}"
        )
    return packed


def _filters(size: int) -> list[dict[str, int]]:
    least, largest = _DICTIONARY
    dictionary = min(max(size, least), largest)
    return [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": dictionary}]


def unpack(text: str) -> dict[str, Any]:
    """Decode a snapshot. Raises ValueError if it is damaged."""
    try:
        packed = base64.b64decode(text, validate=True)
        raw = lzma.LZMADecompressor(lzma.FORMAT_XZ, MAX_MEMORY).decompress(packed, MAX_UNPACKED)
        found = json.loads(raw)
    except (binascii.Error, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found
