"""Excludes long-lived objects, the controllers of a thousand jobs, from garbage collection.

A full collection walks all objects: with a thousand jobs it blocks all answers for a third of a
second. Python starts one whenever enough young objects have survived, and requests in progress
survive. So all objects are frozen once the jobs are known; full collections then walk newer objects
only. Surviving objects are frozen periodically, because connections and reports add some. Frozen
objects are freed with their last reference, but not in cycles; so everything is collected and
frozen again after enough jobs have changed, and once an hour.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

CHECK_SECONDS = 5.0
FREEZE_SECONDS = 30.0
"""Interval of freezing surviving objects while the number of jobs is constant."""
CHANGED_FRACTION = 0.1
"""Fraction of new or gone jobs from which everything is collected."""
COLLECT_SECONDS = 3600.0
YOUNG_GENERATION = 1
"""Highest generation whose collection takes only milliseconds."""


async def freeze_periodically(jobs: Callable[[], int]) -> None:
    """Collect and freeze when due, forever. ``jobs`` returns the number of jobs."""
    clock = asyncio.get_running_loop().time
    before, frozen, at, stayed_at = -1, 0, clock(), clock()
    while True:
        now = jobs()
        moved = now == before and abs(now - frozen) > CHANGED_FRACTION * frozen
        if moved or clock() - at > COLLECT_SECONDS:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            frozen, at, stayed_at = now, clock(), clock()
        elif now != before or clock() - stayed_at > FREEZE_SECONDS:
            gc.collect(YOUNG_GENERATION)
            gc.freeze()
            stayed_at = clock()
        before = now
        await asyncio.sleep(CHECK_SECONDS)
