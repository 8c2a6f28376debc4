"""Messages from leased memory: cards read and write them where the applications do."""

import pytest
from guests import Fabric
from peers import Link, linked

pytestmark = [pytest.mark.rdma]

MIB = 1 << 20


def copied(link: Link) -> tuple[int, int]:
    """Bytes of payloads that the engines have copied, out and in."""
    return link.a.stats()["bytes_copied_out"], link.b.stats()["bytes_copied_in"]


def test_what_is_leased_is_not_copied_at_either_end(fabric: Fabric):
    with linked(fabric) as link:
        link.reserve(4, 2 * MIB)
        link.rails_up(2)
        link.transfer(6, 2 * MIB).finish()
        assert copied(link) == (12 * MIB, 0)
        link.transfer(12, 2 * MIB, leased=True).finish()
        assert copied(link) == (12 * MIB, 0)
        stats = link.a.stats()
        assert stats["transport"] == "rdma" and stats["chunks_resent"] == 0
        assert all(path["chunks"] > 0 for path in stats["paths"][:2])


def test_what_is_leased_survives_the_loss_of_its_queue_pair(fabric: Fabric):
    with linked(fabric) as link:
        link.reserve(4, 2 * MIB)
        link.rails_up(2)
        link.transfer(20, 2 * MIB, leased=True).finish()  # then there is memory for as many
        before = [path["times_lost"] for path in link.a.stats()["paths"][:2]]
        transfer = link.transfer(20, 2 * MIB, leased=True)
        for rail in (0, 1):
            transfer.until_chunks(20, rail)
            link.a.do("sever", path=rail)
        transfer.finish()
        # TCP, which may carry meanwhile, copies a little of what it receives.
        assert copied(link)[0] == 0
        after = [path["times_lost"] for path in link.a.stats()["paths"][:2]]
        assert all(now > then for then, now in zip(before, after, strict=True))
