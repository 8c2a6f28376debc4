"""Whether torch.profiler looks on, and what it must not find under way when it stops.

A profiler that stops gives back the records of all operations, also of those of torch.distributed
that are still under way; torch writes into such a record once the operation is through. Then the
process crashes, or the records of the next iteration are lost. So while a profiler looks on, an
iteration ends when its sends and collectives have.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# Private in torch; without it ranges are always recorded, which is right and only slower.
profiling: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: True)
"""Whether a profiler records what this thread does."""

__all__ = ["profiling"]
