"""Names of an attempt's objects.

Every name contains a few letters of the job's UID. So a job that is created again under its name
does not collide with the old job's objects, nor with an unrelated ``gpt`` Service.
"""

from __future__ import annotations

import base64
import hashlib

MAX_NAME = 63
UID_LETTERS = 5


def hash_uid(uid: str) -> str:
    """A short alphanumeric hash of a UID."""
    digest = hashlib.sha256(uid.encode()).digest()
    return base64.b32encode(digest).decode().lower()[:UID_LETTERS]


def build_name_prefix(name: str, uid: str, room: int) -> str:
    """Common prefix of a job's names, at least ``room`` characters below the limit of 63.

    Starts with a letter, as a Service's name must.
    """
    start = name if name[0].isalpha() else f"j{name}"
    suffix = f"-{hash_uid(uid)}"
    return start[: MAX_NAME - room - len(suffix)].rstrip("-.") + suffix


def build_service_name(name: str, uid: str) -> str:
    """Name of the job's headless Service, the same for all attempts."""
    return build_name_prefix(name, uid, room=0)


def build_attempt_name(name: str, uid: str, attempt: int, pods: int) -> str:
    """Name of the Job, Secret, ConfigMap and PodGroup of an attempt. Short enough that a pod's
    host name, ``NAME-INDEX``, is valid too."""
    suffix = f"-{attempt}"
    return build_name_prefix(name, uid, room=len(suffix) + 1 + len(str(pods - 1))) + suffix


def build_page_secret_name(attempt: str) -> str:
    """Name of the Secret of an attempt's live page."""
    return f"{attempt}-page"
