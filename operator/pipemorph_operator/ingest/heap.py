"""Keeps the garbage collector off what stays: the controllers of a thousand jobs.

A full collection walks all objects, a third of a second of them with so many jobs, and nobody is
answered meanwhile. Python begins one whenever enough young objects have survived, which requests in
progress do. So what there is once the jobs are known is frozen: full collections then walk only
what has come since, and what has stayed is frozen again and again: connections are made, and jobs
tell more of themselves. Frozen objects are freed as their last reference goes, but not in cycles;
so all is collected and frozen anew when the jobs are others and no more come, and now and then.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

LOOK_SECONDS = 5.0
STAYED_SECONDS = 30.0
"""Between two times at which what has stayed is frozen, while no jobs come."""
MOVED = 0.1
"""Part of the jobs that are new or gone, from which all is collected."""
AGAIN_SECONDS = 3600.0
YOUNG = 1
"""The generations up to this one are collected within milliseconds."""


async def freeze(jobs: Callable[[], int]) -> None:
    """Collect and freeze when it is due, forever. ``jobs``: how many there are."""
    clock = asyncio.get_running_loop().time
    before, frozen, at, stayed_at = -1, 0, clock(), clock()
    while True:
        now = jobs()
        moved = now == before and abs(now - frozen) > MOVED * frozen
        if moved or clock() - at > AGAIN_SECONDS:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            frozen, at, stayed_at = now, clock(), clock()
        elif now != before or clock() - stayed_at > STAYED_SECONDS:
            gc.collect(YOUNG)
            gc.freeze()
            stayed_at = clock()
        before = now
        await asyncio.sleep(LOOK_SECONDS)
