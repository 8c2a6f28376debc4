"""Work that keeps a stream of a CUDA device busy for a time."""

from __future__ import annotations

from functools import cache

import torch


@cache
def cycles_per_second() -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10**6)
    start.record()
    torch.cuda._sleep(10**8)
    end.record()
    end.synchronize()
    return 1e8 / (start.elapsed_time(end) / 1e3)


def busy(seconds: float) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(int(seconds * cycles_per_second()))
