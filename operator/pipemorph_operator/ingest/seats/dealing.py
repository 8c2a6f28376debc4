"""Deals jobs to replicas by rendezvous hashing: each job to the seat that weighs most for it.

Who knows the same seats finds the same one, without a word. When a seat goes, only its jobs move;
when one comes, only jobs that become its own do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def seat_of(uid: str, seats: Iterable[str]) -> str | None:
    """The seat that serves the job of this UID; None if there are no seats."""
    return max(seats, key=lambda seat: _weight(seat, uid), default=None)


def _weight(seat: str, uid: str) -> tuple[bytes, str]:
    return hashlib.blake2b(f"{seat}\0{uid}".encode(), digest_size=8).digest(), seat
