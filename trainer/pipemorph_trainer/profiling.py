"""Check whether torch.profiler is active.

A profiler that stops frees the records of all operations, even of operations of torch.distributed
that are still running. torch writes into such a record when the operation ends. Then the process
crashes, or the records of the next iteration are lost. So while a profiler is active, an iteration
waits for its sends and collectives before it ends.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# Private in torch. Without it ranges are always recorded, which is correct but slower.
profiling: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: True)
"""Whether a profiler records what this thread does."""

__all__ = ["profiling"]
