"""Link over two rails, and what can happen to them: every message arrives once, unharmed.

Each test of a fault has evidence from the kernel that it happened: a counter of the device or of
the filter that drops, its GID table, its list of queue pairs, or what it says of a process.

What is marked ``soak`` shows again, of a real device, what the suite of the engine shows with fake
verbs, in its simulation and over TCP (`tests/engine`).
"""

import signal
from collections.abc import Mapping, Sequence

import pytest
from guests import Fabric, Rail
from peers import PATIENCE, Link, linked, paths_text, until, until_stopped

pytestmark = pytest.mark.rdma

MIB = 1 << 20


def until_lost(link: Link, path: int, before: Mapping[str, int]) -> None:
    """Wait until a path was given up once more than `before`, see `Link.times_lost`. The last
    message may arrive before that is noticed."""

    def lost() -> bool:
        now = link.times_lost(path)
        return all(now[end] > before[end] for end in "ab")

    until(f"path {path} given up at both ends", lost, PATIENCE, lambda: paths_text(link.a.stats()))


def until_downed(rails: Sequence[Rail], before: Sequence[int]) -> None:
    """Wait until ports are down. The kernel may take a second to report a lost carrier to its
    devices, if another was lost just before."""
    until(
        "the ports down",
        lambda: all(r.counter("link_downed") > n for r, n in zip(rails, before, strict=True)),
        PATIENCE,
        lambda: ", ".join(f"{r.device} of {r.guest.name}: {r.link_state()}" for r in rails),
    )


def test_both_rails_carry_and_nothing_is_sent_twice(fabric: Fabric):
    both = [fabric.rail(fabric.a, n) for n in (0, 1)]
    sent = [rail.counter("sent_pkts") for rail in both]
    with linked(fabric) as link:
        assert link.transport == "rdma"
        assert link.opened["rails"] == ["rxe0 port 1", "rxe1 port 1"]
        link.reserve(4, MIB)
        link.rails_up(2)
        # Rails that take long to come up may have been tried twice, and TCP may have carried.
        before = link.a.stats()
        link.transfer(12, MIB - 5).finish()
        link.transfer(40, 1000).finish()
        s = link.a.stats()
        assert s["messages_sent"] == 52
        assert s["chunks_resent"] == 0
        for counter in ("reconnects", "fallbacks"):
            assert s[counter] == before[counter], paths_text(s)
        rails, sockets = s["paths"][:2], s["paths"][2:]
        assert all(p["chunks"] > 0 for p in rails)
        assert all(p["chunks"] == 0 for p in sockets)
        assert link.b.stats()["duplicate_chunks"] == 0
        # A packet has at most 4096 bytes.
        for rail, before, path in zip(both, sent, rails, strict=True):
            assert rail.counter("sent_pkts") - before >= path["bytes"] // 4096


def test_cable_pulled_in_mid_message_and_put_back(fabric: Fabric):
    rail = fabric.rail(fabric.a, 0)
    downed = rail.counter("link_downed")
    with linked(fabric) as link:
        link.reserve(4, 2 * MIB)
        link.rails_up(2)
        s, lost = link.a.stats(), link.times_lost(0)
        epoch, fallbacks = s["paths"][0]["epoch"], s["fallbacks"]
        transfer = link.transfer(8, 2 * MIB)
        transfer.until_chunks(4, path=0)
        rail.unplug()
        transfer.finish()
        assert rail.counter("link_downed") > downed
        until_lost(link, 0, lost)
        s = link.a.stats()
        assert s["paths"][0]["times_lost"] == lost["a"] + 1
        assert s["fallbacks"] == fallbacks, paths_text(s)
        assert s["paths"][0]["state"] != "UP"
        # A recovered NIC is used again, with a fresh queue pair.
        rail.plug()
        link.rails_up(2)
        before = link.a.stats()["paths"][0]
        assert before["epoch"] > epoch
        link.transfer(8, 2 * MIB).finish()
        assert link.a.stats()["paths"][0]["chunks"] > before["chunks"]
        assert link.b.stats()["messages_received"] == 16


@pytest.mark.parametrize("ends", ["b", pytest.param("ab", marks=pytest.mark.soak)])
def test_cable_pulled_out_of_the_card(fabric: Fabric, ends: str):
    """The devices stay up: the emulated card loses its carrier, as by a cable that is pulled (at
    both ends) or by half of a switch (at one; the other sees only silence)."""
    rails = [fabric.rail(guest, 0) for guest in (fabric.a, fabric.b) if guest.name in ends]
    downed = [rail.counter("link_downed") for rail in rails]
    with linked(fabric) as link:
        link.reserve(4, 2 * MIB)
        link.rails_up(2)
        s, lost = link.a.stats(), link.times_lost(0)
        epoch, fallbacks = s["paths"][0]["epoch"], s["fallbacks"]
        transfer = link.transfer(8, 2 * MIB)
        transfer.until_chunks(4, path=0)
        for rail in rails:
            rail.pull_cable()
        transfer.finish()
        until_lost(link, 0, lost)
        until_downed(rails, downed)
        assert [rail.link_state() for rail in rails] == ["UP NO-CARRIER"] * len(rails)
        s = link.a.stats()
        assert s["paths"][0]["state"] != "UP"
        assert s["fallbacks"] == fallbacks, paths_text(s)
        # Nothing is set up anew: the cable is enough.
        for rail in rails:
            rail.push_cable()
        link.rails_up(2)
        before = link.a.stats()["paths"][0]
        assert before["epoch"] > epoch
        link.transfer(8, 2 * MIB).finish()
        assert [rail.link_state() for rail in rails] == ["UP LOWER_UP"] * len(rails)
        assert link.a.stats()["paths"][0]["chunks"] > before["chunks"]
        b = link.b.stats()
        assert (b["messages_received"], b["bytes_received"]) == (16, 32 * MIB)


def test_all_rails_down_falls_back_to_tcp_and_returns(fabric: Fabric):
    rails = [fabric.rail(fabric.b, n) for n in (0, 1)]
    with linked(fabric) as link:
        link.reserve(4, 2 * MIB)
        link.rails_up(2)
        transfer = link.transfer(16, 2 * MIB)
        transfer.until_chunks(4, path=0)
        for rail in rails:
            rail.drop_incoming()
        transfer.finish()
        assert all(rail.dropped() > 0 for rail in rails)
        s = link.a.stats()
        assert s["fallbacks"] >= 1, paths_text(s)
        assert s["transport"] == "tcp"
        assert sum(p["chunks"] for p in s["paths"][2:]) > 0
        for rail in rails:
            rail.deliver_again()
        link.rails_up(2)
        carried = sum(p["chunks"] for p in link.a.stats()["paths"][2:])
        link.transfer(6, 2 * MIB).finish()
        s = link.a.stats()
        assert s["failbacks"] == s["fallbacks"]
        assert s["transport"] == "rdma"
        assert sum(p["chunks"] for p in s["paths"][2:]) == carried


def test_the_gid_is_looked_up_again_when_it_changes(fabric: Fabric):
    rail, other_end = (fabric.rail(guest, 0) for guest in (fabric.a, fabric.b))
    with linked(fabric) as link:
        link.reserve(4, MIB)
        link.rails_up(2)
        epoch = link.a.stats()["paths"][0]["epoch"]
        other_end.watch_incoming(source="10.77.1.77")
        rail.guest.sh(
            f"ip -4 address flush dev {rail.netdev}; ip address add 10.77.1.77/24 dev {rail.netdev}"
        )
        rail.until_addressed("10.77.1.77")
        link.transfer(6, MIB).finish()
        # More than a new queue pair, which may have another remaining GID.
        until(
            "packets from the new address",
            lambda: other_end.watched() > 0,
            PATIENCE,
            lambda: paths_text(link.a.stats()),
        )
        link.rails_up(2)
        path, sent = link.a.stats()["paths"][0], other_end.watched()
        assert path["epoch"] > epoch
        link.transfer(8, MIB).finish()
        carried = link.a.stats()["paths"][0]["bytes"] - path["bytes"]
        assert carried > 0
        assert other_end.watched() - sent >= carried // 4096


@pytest.mark.parametrize(
    "deadlines",
    [
        pytest.param((4.0, 8.0), id="first"),
        pytest.param((8.0, 4.0), id="after its peer", marks=pytest.mark.soak),
    ],
)
def test_required_rdma_refuses_to_fall_back(fabric: Fabric, deadlines: tuple[float, float]):
    """The first end to give up may be either, and each names the trouble of its own rails."""
    rails = [fabric.rail(fabric.a, n) for n in (0, 1)]
    downed = [rail.counter("link_downed") for rail in rails]
    with linked(fabric, require="rdma", peer_deadlines=deadlines) as link:
        link.reserve(2, MIB)
        link.rails_up(2)
        assert all(p["kind"] == "rdma" for p in link.a.stats()["paths"])
        # The third one waits for a slot, and then for a rail.
        link.a.do("send", direction=0, first=0, count=3, size=MIB)
        for rail in rails:
            rail.unplug()
        receiving = link.b.start("receive", direction=0, first=2, count=1)
        error = link.a.error_of(link.a.start("wait_sent"))
        assert "rdma is required, and no rail to rank 1 has been up" in error
        assert "rxe0 port 1" in error
        assert "rdma is required, and no rail to rank 0 has been up" in link.b.error_of(receiving)
        assert all(r.counter("link_downed") > n for r, n in zip(rails, downed, strict=True))
        assert link.a.stats()["fallbacks"] == 0


@pytest.mark.soak
def test_a_receiver_that_is_held_up_runs_out_of_receives_and_loses_no_rail(fabric: Fabric):
    """The card acknowledges without its process, so its sender goes on until no receive remains;
    then the sender's card requests again until there are new ones."""
    senders = [fabric.rail(fabric.a, n) for n in (0, 1)]
    with linked(fabric, chunk_bytes=4096, peer_deadline=60.0) as link:
        link.reserve(4, 2 * MIB)  # 2048 chunks, where each rail has 256 receives
        link.rails_up(2)
        lost = [link.times_lost(path) for path in (0, 1)]
        not_ready = [rail.counter("rcvd_rnr_err") for rail in senders]
        link.b.task.signal(signal.SIGSTOP)
        until_stopped(link.b.guest, link.b.pid)
        transfer = link.transfer(8, 2 * MIB)
        # Far more than the seven times that a card counts to before it gives up, if it counts.
        for rail, before in zip(senders, not_ready, strict=True):
            until(
                f"{rail.device} waits for receives",
                lambda rail=rail, before=before: rail.counter("rcvd_rnr_err") > before + 100,
                PATIENCE,
                lambda: paths_text(link.a.stats()),
            )
        link.b.task.signal(signal.SIGCONT)
        transfer.finish()
        assert link.b.stats()["messages_received"] == 8
        assert [link.times_lost(path) for path in (0, 1)] == lost, paths_text(link.a.stats())
