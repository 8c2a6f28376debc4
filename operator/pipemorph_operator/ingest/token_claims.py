"""Checks a token's unverified claims, which rejects most invalid ones without an API request."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

MAX_TOKEN = 16 * 1024


class Unfit(Exception):
    """The token is certainly invalid. ``reason``: label of a metric."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def check(token: str, audience: str, now: float) -> None:
    """Raise :class:`Unfit` for a token that is not a JWT, has expired or has another audience.

    Does not verify the signature: the API server reviews the tokens that pass.
    """
    claims = _claims(token)
    expires = claims.get("exp")
    if isinstance(expires, (int, float)) and expires <= now:
        # The claim can be any number, even one beyond the range of float.
        raise Unfit("expired", f"the token expired {now - max(expires, 0):.0f} s ago")
    found = claims.get("aud")
    audiences = found if isinstance(found, list) else [found]
    if audience not in audiences:
        raise Unfit("audience", "the token's audience is not this job's ingest")


def _claims(token: str) -> dict[str, Any]:
    parts = token.split(".")
    try:
        if len(token) > MAX_TOKEN or len(parts) != 3:
            raise ValueError("not three parts")
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        if not isinstance(claims, dict):
            raise ValueError("claims are not an object")
    except (ValueError, binascii.Error, RecursionError):
        raise Unfit("malformed", "the token is not a service-account token") from None
    return claims
