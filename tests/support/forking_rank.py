"""What a rank of test_forking_job runs: each iteration forks, as data loaders do.

A pool that is terminated and a process that ends by itself while messages are on their way, a child
that calls `sys.exit()` inside the pipeline's block, and one that destroys all it has of the engine.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys

import torch
from torch import nn

from pipemorph_trainer import Pipeline, TrainerContext

fork = multiprocessing.get_context("fork")


def ended_well(child: int) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"the child ended with {status}"


def tell(pipe: Pipeline) -> None:
    (end,) = pipe._parts.links.ends
    assert end.engine_link is not None
    stats = end.engine_link.stats()
    said = {name: getattr(stats, name) for name in ("state", "reconnects", "chunks_resent")}
    print("LINK " + json.dumps(said | {"sent": stats.messages_sent}), flush=True)


def train(context: TrainerContext) -> None:
    assert context.job is not None
    spec = context.job.spec
    stage = nn.Linear(64, 64)
    nn.init.eye_(stage.weight)
    batch = 4 * spec.schedule.microbatches
    with Pipeline(stage, context=context, loss_fn=nn.functional.mse_loss) as pipe:
        for iteration in range(spec.trainer.iterations):
            if iteration == spec.trainer.iterations - 1:
                tell(pipe)  # while the neighbour cannot have closed the link yet
            pool = fork.Pool(2)
            assert pool.map(abs, [-1, -2]) == [1, 2]
            process = fork.Process(target=int)
            process.start()
            pipe.step(torch.ones(batch, 64), target=torch.zeros(batch, 64))
            pool.terminate()
            pool.join()
            process.join()
            assert process.exitcode == 0, process.exitcode
            child = os.fork()
            if child == 0:
                sys.exit(0)
            ended_well(child)
            child = os.fork()
            if child == 0:
                vars(pipe).clear()
                gc.collect()
                os._exit(0)
            ended_well(child)


if __name__ == "__main__":
    train(TrainerContext.from_env())
