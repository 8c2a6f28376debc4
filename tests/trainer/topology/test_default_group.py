"""A pipeline in a script that has made the default process group."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from torch import nn
from trainer_jobs import Job, Record, assert_same, train

from pipemorph.errors import InputError
from pipemorph.spec.sections.trainer import Checkpoint
from pipemorph_trainer import Pipeline, TrainerContext
from pipemorph_trainer.topology.mesh import join_process_group

LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp."""


def train_with_group(context: TrainerContext, backend: str, folder: str) -> Record:
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{context.master_port}",
        rank=context.rank,
        world_size=context.world_size,
    )
    record = train(context, Job(2, 4))
    pipe = Pipeline(
        nn.Linear(4, 4), context=context, loss_fn=nn.functional.mse_loss, microbatches=2,
        stages=2, deadline_seconds=30.0, checkpoint=Checkpoint(directory=folder, every=9),
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
    )  # fmt: skip
    with pipe:
        pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
        record.norms.append(pipe.clip_grad_norm_(1.0))
        record.losses.append(pipe.evaluate(torch.ones(4, 4), target=torch.zeros(4, 4)))
        pipe.save()
    alone = backend == "cuda:gloo"
    with pytest.raises(RuntimeError, match="device type cpu") if alone else nullcontext():
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    return record


def listening_at(port: int) -> set[str]:
    """Addresses at which this machine listens at a port, as /proc/net/tcp and tcp6 show them."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, _, number = line.split()[1].partition(":")
            if line.split()[3] == LISTEN and int(number, 16) == port:
                found.add(address)
    return found


def stored(context: TrainerContext, host: str) -> tuple[set[str], float]:
    """Address of the store of the ranks, and the sum of ones over all ranks."""
    join_process_group(replace(context, master_addr=host), torch.device("cpu"))
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return listening_at(context.master_port), float(ones)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "0100007F"),
        ("localhost", "0100007F"),
        ("127.0.0.2", "0200007F"),
        ("::1", "00000000000000000000000001000000"),
    ],
)
def test_the_store_of_one_machine_listens_at_loopback_only(host: str, address: str) -> None:
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    for addresses, ranks in run_ranks(2, stored, host):
        assert (addresses, ranks) == ({address}, 2.0)


def test_a_port_that_is_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        context = TrainerContext(0, 2, 0, "127.0.0.1", port)
        with pytest.raises(InputError, match=rf"port {port} of 127.0.0.1 .* set MASTER_PORT"):
            join_process_group(context, torch.device("cpu"))


def test_a_default_group_for_the_device_alone(tmp_path: Path) -> None:
    """Group as ``init_process_group("nccl")`` makes it; gloo that takes no host tensors."""
    found = run_ranks(4, train_with_group, "cuda:gloo", str(tmp_path / "a"), timeout=100.0)
    assert_same(found, run_ranks(4, train_with_group, "gloo", str(tmp_path / "b"), timeout=100.0))
    assert len({float(norm) for record in found for norm in record.norms}) == 1
    for name in "ab":
        assert list((tmp_path / name).glob("*/.metadata")), f"no checkpoint in {name}"
