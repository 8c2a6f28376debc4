"""Memory and files of a run do not grow with its length."""

from __future__ import annotations

import gc
import threading
from collections import deque
from pathlib import Path
from typing import NamedTuple

import pytest
from launch import run_ranks
from trainer_jobs import Job, loss_fn, make_batch, make_stage

from pipemorph_trainer import Options, Pipeline, TrainerContext
from pipemorph_trainer.transport.engine_setup import load_engine_module

pytestmark = pytest.mark.full

SETTLED, ITERATIONS = 60, 360
MESSAGES = 20
"""Messages that may be on their way when entries are counted."""
RESIDENT_BYTES = 6 << 20
"""An allocator does not settle exactly. 20 kB an iteration would be seen."""


class Held(NamedTuple):
    entries: int
    resident: int
    files: int
    threads: int


def entries(root: object) -> int:
    """Entries of every container that ``root`` holds, directly or through objects of ours."""
    seen, todo, count = {id(root)}, [root], 0
    while todo:
        at = todo.pop()
        if isinstance(at, (dict, list, set, deque)):
            count += len(at)
        for inner in gc.get_referents(at):
            ours = type(inner).__module__.startswith("pipemorph")
            if id(inner) not in seen and (ours or isinstance(inner, (dict, list, set, deque))):
                seen.add(id(inner))
                todo.append(inner)
    return count


def held(pipe: Pipeline) -> Held:
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))
    return Held(
        entries(pipe),
        resident,
        len(list(Path("/proc/self/fd").iterdir())),
        threading.active_count(),
    )


def endure(context: TrainerContext, route: str) -> tuple[Held, Held]:
    job = Job(2, 2)
    module = make_stage(context.rank, job.stages, job.dtype)
    tokens, target = make_batch(0, job.batch * job.microbatches)
    with Pipeline(
        module,
        context=context,
        loss_fn=loss_fn,
        microbatches=job.microbatches,
        options=Options(route=route),  # type: ignore[arg-type]
    ) as pipe:
        for iteration in range(ITERATIONS):
            if iteration == SETTLED:
                before = held(pipe)
            pipe.step(tokens, target=target)
            pipe.clip_grad_norm_(1.0)
        after = held(pipe)
    return before, after


@pytest.mark.parametrize("route", ["direct", "delegated"])
def test_hundreds_of_iterations_hold_what_sixty_do(route: str) -> None:
    if route == "delegated" and load_engine_module() is None:
        pytest.fail("the engine is not built")
    for rank, (before, after) in enumerate(run_ranks(2, endure, route)):
        assert abs(after.entries - before.entries) < MESSAGES, f"rank {rank}: {before} {after}"
        assert after.resident - before.resident < RESIDENT_BYTES, f"rank {rank}: {before} {after}"
        assert after.files < before.files + 4, f"rank {rank}: {before} {after}"
        assert after.threads == before.threads, f"rank {rank}: {before} {after}"
