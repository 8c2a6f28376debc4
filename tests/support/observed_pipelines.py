"""Trains on torch's own pipeline schedules, for tests and benchmarks that observe them.

A program as well: ``torchrun … observed_pipelines.py`` trains 1F1B for three steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from profiled_pipelines import make_schedule, place_stages
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from pipemorph_trainer.context import TrainerContext

WIDTH = 16


class ObservedRun(NamedTuple):
    """Training of a small model. ``breaks``: what fails in the observation, of
    :func:`break_observation`."""

    schedule: str = "1F1B"
    microbatches: int = 4
    steps: int = 4
    replicas: int = 1
    observed: bool = True
    accumulate: int = 1
    evaluate: bool = False
    own_optimizer: bool = False
    """Whether the parameters are updated by the script, and no optimizer of torch."""
    data_parallel: bool = False
    """Whether the stages are wrapped by DDP, which reduces their gradients over replicas."""
    breaks: str = ""


def train_observed(context: TrainerContext, run: ObservedRun, folder: str) -> dict[str, Any]:
    """Train on this rank, observed or not."""
    from pipemorph_trainer.observe import observe

    observation = observe(folder, most_bytes=1 << 20) if run.observed else None
    if run.breaks:
        break_observation(run.breaks, folder)
    address = f"tcp://127.0.0.1:{context.master_port}"
    dist.init_process_group("gloo", address, rank=context.rank, world_size=context.world_size)
    found = train_pipeline(run)
    if observation is not None:
        found["active"] = observation.active
        observation.stop()
    return found


def train_pipeline(run: ObservedRun) -> dict[str, Any]:
    """Train in the process group that there is, and end it. Returns losses, as hexadecimal, and a
    hash of all gradients and of the parameters."""
    sizes = dist.get_world_size() // run.replicas, run.replicas
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp_shard"))
    group = mesh.get_group("pp")
    mine, stages = place_stages(run.schedule, group.rank(), group.size())
    modules: list[nn.Module] = []
    for index in mine:
        torch.manual_seed(index)
        modules.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    if run.data_parallel:
        # Some buckets are reduced while the backward computes. Torch rebuilds them in the second
        # step, unless parameters may be unused, and fails if a step has several microbatches.
        modules = [
            DistributedDataParallel(
                module, process_group=mesh.get_group("dp_shard"), bucket_cap_mb=1e-3,
                find_unused_parameters=True,
            )
            for module in modules
        ]  # fmt: skip
    pipeline = make_schedule(run.schedule, modules, group, run.microbatches)
    parameters = [p for module in modules for p in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, 1e-2)
    hashed = hashlib.sha256()
    losses: list[Tensor] = []
    torch.manual_seed(99 + (mesh.get_local_rank("dp_shard") if run.data_parallel else 0))
    samples = torch.randn(run.steps * run.accumulate * 4 * run.microbatches, WIDTH)
    batches = iter(DataLoader(samples, batch_size=4 * run.microbatches))  # type: ignore[arg-type]

    def pass_batch(step: Any, x: Tensor) -> None:
        args = (x,) if 0 in mine else ()
        kwargs = {"target": x.sin(), "losses": losses} if stages - 1 in mine else {}
        step(*args, **kwargs)

    for _ in range(run.steps):
        for _ in range(run.accumulate):
            pass_batch(pipeline.step, next(batches))
        if run.evaluate:
            pass_batch(pipeline.eval, samples[: 4 * run.microbatches])
        for parameter in parameters:
            assert parameter.grad is not None
            hashed.update(parameter.grad.numpy().tobytes())
        if run.own_optimizer:
            with torch.no_grad():
                for parameter in parameters:
                    assert parameter.grad is not None
                    parameter.add_(-1e-2 * parameter.grad)
        else:
            optimizer.step()
        optimizer.zero_grad()
    for parameter in parameters:
        hashed.update(parameter.detach().numpy().tobytes())
    dist.barrier()
    dist.destroy_process_group()
    return {
        "losses": [float(loss.detach()).hex() for loss in losses],
        "hash": hashed.hexdigest(),
    }


def break_observation(what: str, folder: str) -> None:
    """Break the observation of this process."""
    from torch.distributed.pipelining import schedules

    from pipemorph_trainer import record
    from pipemorph_trainer.observe.observation import Observation

    untyped: Any = Observation
    hooked: Any = schedules
    if what == "raises":
        untyped.add = _raise_error
    elif what == "disk":
        recorder: Any = record
        recorder.os.write = _fill_disk
    elif what == "folder":
        Path(folder, f"rank{os.environ.get('RANK', '0')}.jsonl").mkdir(parents=True, exist_ok=True)
        for rank in range(8):
            Path(folder, f"rank{rank}.jsonl").mkdir(exist_ok=True)
    elif what == "renamed":
        # As in another version of torch: the schedules call functions that are not hooked.
        hooked._wait_batch_p2p = hooked._wait_batch_p2p.__wrapped__
        hooked._batch_p2p = hooked._batch_p2p.__wrapped__
    else:
        raise AssertionError(what)


def _raise_error(*_: object) -> None:
    raise RuntimeError("broken on purpose")


def _fill_disk(*_: object) -> int:
    raise OSError(28, "No space left on device")


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Rows of the op tables in a folder."""
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    number = dist.get_rank()
    result = train_pipeline(ObservedRun(steps=3))
    Path(sys.argv[1], f"result{number}.json").write_text(json.dumps([*sys.argv[2:], result]))
