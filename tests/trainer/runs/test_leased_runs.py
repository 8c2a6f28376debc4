"""Runs over shared memory: messages lie in the receiver's slots until the last op that reads them.

Results equal a sequential run to the bit, and the engine counts what it copies.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from launch import run_ranks
from simulated_device import Driver, SimulatedDevice
from trainer_jobs import Job, Record, assert_same, make_plan, reference, train

from pipemorph.planning import Route
from pipemorph.spec.sections.faults import Fault
from pipemorph_trainer import TrainerContext
from pipemorph_trainer.schedule import pipeline_builder
from pipemorph_trainer.transport import rendezvous
from pipemorph_trainer.transport.channels import delegated
from pipemorph_trainer.transport.link import LinkEnd

pytestmark = pytest.mark.needs_engine


class Traffic(NamedTuple):
    """Bytes at one end of a link."""

    sent: int
    received: int
    copied_out: int
    copied_in: int
    slots_in_use: int


def train_and_count(context: TrainerContext, job: Job) -> tuple[Record, list[Traffic]]:
    delegated.LARGE_BYTES = 1  # These messages are small, so that they are many.
    found: list[Traffic] = []
    close = LinkEnd.close

    def count(self: LinkEnd, **options: bool) -> None:
        s = self.engine_link.stats()
        copied = s.bytes_copied_out, s.bytes_copied_in
        found.append(Traffic(s.bytes_sent, s.bytes_received, *copied, s.slots_in_use))
        close(self, **options)

    LinkEnd.close = count  # type: ignore[method-assign]
    return train(context, job), found


def train_on_device(context: TrainerContext, job: Job) -> tuple[Record, list[Traffic]]:
    device = SimulatedDevice(prompt=True)
    driver = Driver(device, 5 + context.rank)
    for module in (rendezvous, pipeline_builder):
        vars(module)["get_accelerator"] = lambda _: device
    found = train_and_count(context, job)
    driver.close()
    assert not device.registered, "memory stayed page-locked"
    return found


@pytest.mark.parametrize("policy", ["zero-bubble", pytest.param("1f1b", marks=pytest.mark.full)])
def test_messages_are_read_where_they_arrived(policy: str) -> None:
    job = Job(3, 6, policy=policy, route="delegated", engine="shm", iterations=5)
    found = run_ranks(3, train_and_count, job)
    assert_same([record for record, _ in found], reference(Job(3, 6, iterations=5)))
    for end in (end for _, ends in found for end in ends):
        assert end.sent > 0 and end.received > 0
        assert end.copied_in == 0 and end.copied_out == end.sent
        assert end.slots_in_use == 0


def test_on_a_device_messages_are_copied_by_it_alone() -> None:
    job = Job(3, 6, policy="1f1b", route="delegated", engine="shm", iterations=5)
    found = run_ranks(3, train_on_device, job, timeout=100)
    assert_same([record for record, _ in found], reference(Job(3, 6, iterations=5)))
    for end in (end for _, ends in found for end in ends):
        # The sender's slots are not page-locked yet in the first iteration.
        assert end.copied_in == 0 and end.copied_out < end.sent / 2
        assert end.slots_in_use == 0


@pytest.mark.full
def test_routes_change_while_messages_lie_in_slots() -> None:
    """Routes go from the engine to direct and back, and the engine's paths break meanwhile."""
    job = Job(3, 6, policy="1f1b", route="auto", engine="shm", iterations=8)
    delegated_first = (Route.DELEGATED, Route.DIRECT)
    second = make_plan(job, 2, "zero-bubble", routes=delegated_first)
    third = make_plan(job, 5, "1f1b")
    fourth = make_plan(job, 7, "zero-bubble", routes=delegated_first)
    faults = [Fault(link=0, sever="data", from_iteration=at) for at in (2, 6)]
    switches = ((0, second, (0, 1, 2)), (3, third, (0, 1, 2)), (5, fourth, (0, 1, 2)))
    found = run_ranks(3, train_and_count, job.with_(switches=switches, faults=faults))
    assert_same([record for record, _ in found], reference(Job(3, 6, iterations=8)))
    versions = [record.versions for record, _ in found]
    assert {2, 5, 7} <= set(versions[0]) and versions.count(versions[0]) == 3
    for end in (end for _, ends in found for end in ends):
        assert end.copied_in == 0
        # A mask is passed on, and the direct route keeps the last ones that it has sent.
        assert end.slots_in_use <= 2
