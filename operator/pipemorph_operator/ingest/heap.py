"""Keeps the garbage collector off what stays: the controllers of a thousand jobs.

A full collection walks all objects, a third of a second of them with so many jobs, and nobody is
answered meanwhile. Python begins one whenever enough young objects have survived, which requests in
progress do. So what there is once the jobs are known is frozen: full collections then walk only
what has come since. Frozen objects are freed as their last reference goes, but not in cycles; so
all is collected and frozen anew when the jobs are others and no more come, and now and then.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

LOOK_SECONDS = 5.0
MOVED = 0.1
"""Part of the jobs that are new or gone, from which all is collected."""
AGAIN_SECONDS = 3600.0


async def freeze(jobs: Callable[[], int]) -> None:
    """Collect and freeze when it is due, forever. ``jobs``: how many there are."""
    clock = asyncio.get_running_loop().time
    before, frozen, at = -1, 0, clock()
    while True:
        now = jobs()
        moved = now == before and abs(now - frozen) > MOVED * frozen
        before = now
        if moved or clock() - at > AGAIN_SECONDS:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            frozen, at = now, clock()
        await asyncio.sleep(LOOK_SECONDS)
