"""Ranks of several machines, or namespaces of one, whatever their names."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from torch import nn

from pipemorph_trainer import Options, Pipeline, TrainerContext
from pipemorph_trainer.topology import addresses
from pipemorph_trainer.topology.addresses import Machine, identify_machine
from pipemorph_trainer.transport import control_socket, rendezvous

ELSEWHERE = "127.0.0.2"
"""Stands for the address a machine has in its network; what listens at 127.0.0.1 is not there."""


def test_a_machine_is_identified_by_its_kernel_and_its_network() -> None:
    here = identify_machine()
    assert here == identify_machine()
    assert here.hostname == socket.gethostname()
    assert here.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert here.network == str(Path("/proc/self/ns/net").readlink())


def test_where_the_kernel_does_not_say_names_have_to_do(tmp_path: Path) -> None:
    here = identify_machine(tmp_path)
    assert here == Machine(socket.gethostname(), "", "")
    assert here.shares_clock(here) and here.shares_loopback(here)
    assert not here.shares_clock(identify_machine())


def meet(
    context: TrainerContext,
    changed: str | None,
    route: str = "direct",
    *,
    loopback_stands_for_a_network: bool = True,
) -> tuple[list[str], list[bool], float]:
    """Addresses that this rank dialled, whether each neighbour reads its clock, and its loss. Rank
    1 is where ``changed`` is another."""
    if context.rank == 1 and changed is not None:
        there = identify_machine()._replace(**{changed: "another"})
        vars(rendezvous)["identify_machine"] = lambda: there
    if loopback_stands_for_a_network:
        vars(addresses)["find_reachable_address"] = lambda address, peers=(): address
        if context.master_addr == "127.0.0.1":
            vars(addresses)["find_own_address"] = lambda master_addr: ELSEWHERE
    dialled: list[str] = []
    dial = control_socket.connect_to_peer

    def watched(host: str, *args: Any, **options: Any) -> control_socket.ControlSocket:
        dialled.append(host)
        return dial(host, *args, **options)

    vars(control_socket)["connect_to_peer"] = watched
    torch.manual_seed(context.rank)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=4, policy="1f1b",
        options=Options(route=route, engine="tcp"),
    ) as pipe:  # fmt: skip
        loss = pipe.step(torch.ones(8, 4), target=torch.zeros(8, 4))
        return dialled, [end.same_host for end in pipe._parts.links.ends], float(loss)


@pytest.mark.parametrize(
    ("changed", "address", "one_clock"),
    [
        pytest.param(None, "127.0.0.1", True, marks=pytest.mark.full),
        pytest.param("hostname", ELSEWHERE, False, marks=pytest.mark.full),
        # Clones of one machine: one name, two kernels.
        ("boot_id", ELSEWHERE, False),
        # Containers that share name and kernel, each with a network of its own.
        pytest.param("network", ELSEWHERE, True, marks=pytest.mark.full),
    ],
)
def test_neighbours_meet_where_they_are(changed: str | None, address: str, one_clock: bool) -> None:
    zero, one = run_ranks(2, meet, changed, context={"secret": b"secret"})
    assert zero == ([address], [one_clock], one[2])
    assert one[:2] == ([], [one_clock])


@pytest.mark.parametrize("route", ["direct", pytest.param("delegated", marks=pytest.mark.full)])
def test_a_machine_whose_own_name_is_a_loopback_address_is_reached_by_others(route: str) -> None:
    reached = addresses.find_reachable_address("127.0.1.1")
    among_machines = partial(meet, loopback_stands_for_a_network=False)
    zero, one = run_ranks(2, among_machines, "hostname", route, context={"secret": b"secret"})
    assert zero == ([reached], [False], one[2])


@pytest.mark.full
@pytest.mark.ipv6
@pytest.mark.parametrize("route", ["direct", "delegated"])
def test_neighbours_meet_over_ipv6(route: str) -> None:
    context = {"secret": b"secret", "master_addr": "::1"}
    zero, one = run_ranks(2, meet, "network", route, context=context)
    assert zero == (["::1"], [True], one[2])
