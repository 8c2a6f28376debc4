"""``python -m pipemorph_trainer.launcher.page FD``: the process of the live page, with a low
priority and bounded memory. If memory is short, the kernel kills it first."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

NICE = 10
MEMORY_BYTES = 512 << 20
"""Limit of the process's data. A job of 64 stages and 256 microbatches takes about 150 MB."""
OOM_SCORE_ADJ = "1000"


def yield_to_ranks() -> None:
    """Lower the priority, limit the memory, and become the first victim of a memory shortage."""
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    with contextlib.suppress(FileNotFoundError):  # not on Linux
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE_ADJ)


if __name__ == "__main__":
    yield_to_ranks()  # before the imports, which take most of a second
    from pipemorph_trainer.launcher.page.page_process import main

    main()
