"""Use of rails: each by its rate, and their packets in the class that the job names.

The evidence is the engine's counters of chunks, and the kernel's of what a rail received.
"""

import pytest
from guests import Fabric
from peers import linked, paths_text

pytestmark = pytest.mark.rdma

KIB, MIB = 1 << 10, 1 << 20
TRAFFIC_CLASS = 26 << 2  # DSCP 26, AF31
PACKET = 4096


def test_packets_are_of_the_traffic_class_that_is_given(fabric: Fabric):
    """The class holds both ways: for payload, and for the receiver's acknowledgements."""
    ends = [fabric.rail(guest, 0) for guest in (fabric.a, fabric.b)]
    with linked(fabric, rdma_devices=["rxe0"], traffic_class=TRAFFIC_CLASS) as link:
        link.reserve(2, MIB)
        link.rails_up(1)
        for rail in ends:
            rail.watch_incoming(traffic_class=TRAFFIC_CLASS)
        before = link.a.stats()["paths"][0]["bytes"]
        link.transfer(4, MIB).finish()
        carried = link.a.stats()["paths"][0]["bytes"] - before
        assert carried == 4 * MIB, paths_text(link.a.stats())
        acknowledged, arrived = (rail.watched() for rail in ends)
        assert arrived >= carried // PACKET
        assert acknowledged > 0


@pytest.mark.soak  # By the rates of two emulated machines; in simulated time: verbs_test.cpp.
def test_a_slow_rail_leaves_short_queues_to_the_fast_one(fabric: Fabric):
    """Messages go singly, each of a few chunks: what the slow rail takes of a message, the message
    waits for. By the chunk in turns it would carry a part of every one."""
    rounds, chunks, chunk = 40, 8, 16 * KIB
    slow = fabric.rail(fabric.a, 0)
    with linked(fabric, chunk_bytes=chunk) as link:
        link.reserve(4, MIB)
        link.rails_up(2)
        slow.slow("2mbit")
        link.transfer(4, MIB).finish()  # both have shown their rates
        before = [path["chunks"] for path in link.a.stats()["paths"]]
        taken = link.b.start("swallow", direction=0, first=4, count=rounds)
        link.a.do("send_singly", direction=0, size=chunks * chunk, count=rounds, first=4)
        link.b.result(taken)
        now = link.a.stats()
        carried = [path["chunks"] - n for path, n in zip(now["paths"], before, strict=True)]
        assert sum(carried) == rounds * chunks, paths_text(now)
        assert carried[0] < sum(carried) / 10, carried
        assert carried[1] > sum(carried) * 9 / 10, carried
        assert now["paths"][0]["state"] == "UP", paths_text(now)
