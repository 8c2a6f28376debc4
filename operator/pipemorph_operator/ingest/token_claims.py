"""What a token says of itself, unverified: enough to refuse most wrong ones for free."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

MAX_TOKEN = 16 * 1024


class Unfit(Exception):
    """The token cannot be the right one. ``reason``: for a metric."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def check(token: str, audience: str, now: float) -> None:
    """Raise :class:`Unfit` for a token that is no JWT, is out of date or of another audience.

    Proves nothing: the API server is asked about those that pass.
    """
    claims = _claims(token)
    expires = claims.get("exp")
    if isinstance(expires, (int, float)) and expires <= now:
        # It can be any number at all, also one that no float holds.
        raise Unfit("expired", f"the token expired {now - max(expires, 0):.0f} s ago")
    found = claims.get("aud")
    audiences = found if isinstance(found, list) else [found]
    if audience not in audiences:
        raise Unfit("audience", "the token is for another audience than this job's ingest")


def _claims(token: str) -> dict[str, Any]:
    parts = token.split(".")
    try:
        if len(token) > MAX_TOKEN or len(parts) != 3:
            raise ValueError("not three parts")
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        if not isinstance(claims, dict):
            raise ValueError("claims are no object")
    except (ValueError, binascii.Error, RecursionError):
        raise Unfit("malformed", "the token is no service-account token") from None
    return claims
