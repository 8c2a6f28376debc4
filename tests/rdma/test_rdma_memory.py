"""Receive slots that a rail cannot write to: the link goes on without that rail."""

import pytest
from guests import Fabric
from peers import PATIENCE, linked, paths_text, until

pytestmark = [pytest.mark.rdma]

MIB = 1 << 20


def test_slots_beyond_the_memlock_limit_leave_the_link_to_tcp(fabric: Fabric):
    with linked(fabric) as link:
        link.rails_up(2)
        before = link.a.stats()
        link.reserve(4, 2 * MIB, locked_limit=MIB)
        link.transfer(6, 2 * MIB).finish()
        until(
            "no rail in use at either end",
            lambda: all(
                path["state"] not in ("UP", "SUSPECT")
                for peer in (link.a, link.b)
                for path in peer.stats()["paths"][:2]
            ),
            PATIENCE,
            lambda: paths_text(link.a.stats()),
        )
        a, b = link.a.stats(), link.b.stats()
        assert (a["transport"], b["transport"]) == ("tcp", "tcp")
        assert (a["fallbacks"], a["failbacks"]) == (before["fallbacks"] + 1, before["failbacks"])
        assert sum(path["chunks"] for path in a["paths"][:2]) == 0
        for n, path in enumerate(b["paths"][:2]):
            assert f"registering {8 * MIB} bytes with rxe{n} failed" in path["last_error"]
            assert "the memlock limit is 1024 KiB" in path["last_error"]
        assert all(
            path["last_error"] == f"rxe{n} port 1: rank 1 cannot register its memory with it"
            for n, path in enumerate(a["paths"][:2])
        )
        # The way back: what rank 0 receives may be registered, but the rails are out of use.
        link.a.do("reserve", direction=1, slots=1, size=MIB)
        link.b.do("send", direction=1, first=0, count=1, size=MIB)
        assert link.a.do("receive", direction=1, first=0, count=1) == []
        link.b.do("wait_sent")


def test_where_rdma_is_required_slots_must_be_registered(fabric: Fabric):
    with linked(fabric, require="rdma") as link:
        link.rails_up(2)
        said = link.b.error_of(
            link.b.start("reserve", direction=0, slots=4, size=2 * MIB, locked_limit=MIB)
        )
        assert "rdma is required, and registering" in said
        assert "the memlock limit is 1024 KiB" in said
