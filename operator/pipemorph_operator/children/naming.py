"""Names of an attempt's objects.

A few letters of the job's UID are part of every name: a job that is deleted and created again
under its name never meets its predecessor's objects, and nobody's ``gpt`` Service is hit.
"""

from __future__ import annotations

import base64
import hashlib

MAX_NAME = 63
UID_LETTERS = 5


def uid_letters(uid: str) -> str:
    """Letters that stand for a UID."""
    digest = hashlib.sha256(uid.encode()).digest()
    return base64.b32encode(digest).decode().lower()[:UID_LETTERS]


def job_base(name: str, uid: str, room: int) -> str:
    """What all names of a job start with, with ``room`` characters left of 63.

    Starts with a letter, as a Service's name must.
    """
    start = name if name[0].isalpha() else f"j{name}"
    suffix = f"-{uid_letters(uid)}"
    return start[: MAX_NAME - room - len(suffix)].rstrip("-.") + suffix


def service_name(name: str, uid: str) -> str:
    """The job's headless Service, the same for all attempts."""
    return job_base(name, uid, room=0)


def attempt_name(name: str, uid: str, attempt: int, ranks: int) -> str:
    """Job, Secret, ConfigMap and PodGroup of an attempt. ``NAME-INDEX``, a rank's host name,
    fits as well."""
    suffix = f"-{attempt}"
    return job_base(name, uid, room=len(suffix) + 1 + len(str(ranks - 1))) + suffix
