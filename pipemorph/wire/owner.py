"""Which replica of the ingest serves a job, as one that does not serve it says in its answer 421.

An answer may name any address. So whoever follows it sends the token only over TLS, and only to who
has a certificate for the *Service's* name that the authority of the job's ingest has signed.
"""

from __future__ import annotations

import ipaddress
import json
import logging

log = logging.getLogger("pipemorph.wire")


def owner_in(answer: bytes) -> str | None:
    """The ``ADDRESS:PORT`` that the body of an answer names; None if none that may be followed."""
    try:
        owner = json.loads(answer).get("owner")
    except (ValueError, AttributeError, RecursionError):
        return None
    if owner is None or _is_address(owner):
        return None if owner is None else str(owner)
    log.warning("a replica of the ingest names %.100r as owner; expected ADDRESS:PORT", owner)
    return None


def _is_address(text: object) -> bool:
    """Whether this is an IP address and a port, and nothing else that a URL may contain."""
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    shown = f"[{address}]" if address.version == 6 else str(address)
    number = port.isascii() and port.isdigit() and len(port) <= 5
    return shown == host and number and 0 < int(port) < 2**16
