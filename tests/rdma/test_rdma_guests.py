"""The guests themselves: one whose kernel panics fails the test that is under way, and no other."""

import time

import pytest
from guests import Fabric, GuestError

pytestmark = [pytest.mark.rdma, pytest.mark.soak]
_SEEN: list[Fabric] = []


def test_a_guest_that_dies_is_named_at_once(fabric: Fabric):
    _SEEN.append(fabric)
    began = time.monotonic()
    with pytest.raises(GuestError, match="guest a is no longer there") as error:
        fabric.a.sh("echo c > /proc/sysrq-trigger")
    assert "Kernel panic" in str(error.value)
    assert time.monotonic() - began < 30
    with pytest.raises(GuestError, match="guest a is no longer there"):
        fabric.a.run("true")


def test_the_next_test_finds_new_guests(fabric: Fabric):
    assert _SEEN and fabric is not _SEEN[0]
    assert {rail.guest.run("uname").strip() for rail in fabric.rails} == {"Linux"}
