"""Names of an attempt's objects.

Every name contains a few letters of the job's UID: a job that is deleted and created again under
the same name never collides with the old job's objects, nor with an unrelated ``gpt`` Service.
"""

from __future__ import annotations

import base64
import hashlib

MAX_NAME = 63
UID_LETTERS = 5


def uid_letters(uid: str) -> str:
    """A short alphanumeric hash of a UID."""
    digest = hashlib.sha256(uid.encode()).digest()
    return base64.b32encode(digest).decode().lower()[:UID_LETTERS]


def job_base(name: str, uid: str, room: int) -> str:
    """Common prefix of a job's names, which leaves ``room`` of the 63 characters free.

    Starts with a letter, as a Service's name must.
    """
    start = name if name[0].isalpha() else f"j{name}"
    suffix = f"-{uid_letters(uid)}"
    return start[: MAX_NAME - room - len(suffix)].rstrip("-.") + suffix


def service_name(name: str, uid: str) -> str:
    """Name of the job's headless Service, the same for all attempts."""
    return job_base(name, uid, room=0)


def attempt_name(name: str, uid: str, attempt: int, pods: int) -> str:
    """Name of the Job, Secret, ConfigMap and PodGroup of an attempt. Short enough that a pod's
    host name, ``NAME-INDEX``, is valid too."""
    suffix = f"-{attempt}"
    return job_base(name, uid, room=len(suffix) + 1 + len(str(pods - 1))) + suffix


def page_secret(attempt: str) -> str:
    """Name of the Secret of an attempt's live page."""
    return f"{attempt}-page"
