"""`pipemorph fabric check` between two hosts with healthy, slow, small, down or cut rails.

The faults are the kernel's.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from guests import Done, Fabric, Guest, Rail

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(600)]

COMMAND = (sys.executable, "-m", "pipemorph.cli", "fabric", "check")
SHELL = (sys.executable, str(Path(__file__).with_name("remote_shell.py")))
DEADLINE = 240.0
Ends = tuple[str, str, str, str]


def run(fabric: Fabric, *argv: str) -> Done:
    """Guest a leads, and reaches guest b by the remote shell."""
    address = fabric.CONTROL["b"]
    task = fabric.b.spawn(*SHELL, "--listen", address)
    try:
        assert task.hear() == "listening"
        hosts = ("--hosts", f"localhost,{address}", "--shell", f"{' '.join(SHELL)} {{host}}")
        done = fabric.a.try_run(*COMMAND, *hosts, *argv, deadline=DEADLINE)
        assert task.reap(DEADLINE) == 0
    finally:
        task.kill()
    assert done.rc in (0, 1), done.err
    assert done.err == ""
    return done


def checked(fabric: Fabric, *argv: str) -> tuple[int, dict[str, Any]]:
    done = run(fabric, "--output", "json", *argv)
    return done.rc, json.loads(done.out)


def direction(fabric: Fabric, source: Guest, rail: int) -> Ends:
    """The direction from a guest: host and port of both ends, as the check names them."""
    names = {"a": "localhost", "b": fabric.CONTROL["b"]}
    target = "b" if source.name == "a" else "a"
    return names[source.name], f"rxe{rail}/1", names[target], f"rxe{rail}/1"


def by_ends(said: dict[str, Any]) -> dict[Ends, dict[str, Any]]:
    """The measurements by their ends."""
    return {
        (
            *(m["source"][k] for k in ("host", "rail")),
            *(m["target"][k] for k in ("host", "rail")),
        ): m
        for m in said["measured"]
    }


def drop_large(rail: Rail) -> None:
    """Drop incoming packets of 2,048 bytes or more, as a switch on the way does whose MTU is
    smaller than the ports'. u32 compares bits, so one filter for each bit."""
    rail.guest.sh(
        f"tc qdisc replace dev {rail.netdev} clsact\n"
        + "\n".join(
            f"tc filter add dev {rail.netdev} ingress protocol ip u32 match ip dport 4791 0xffff "
            f"match u16 {bit:#x} {bit:#x} at 2 action drop"
            for bit in (0x800, 0x1000)
        )
    )


def test_the_rails_made_slow_and_small_of_mtu_are_measured(fabric: Fabric):
    small, slow = fabric.rail(fabric.b, 0), fabric.rail(fabric.a, 1)
    try:
        drop_large(small)
        slow.slow("5mbit")
        status, said = checked(fabric)
    finally:
        fabric.restore()
    found, shown = by_ends(said), json.dumps(said, indent=1)
    assert status == 1
    to_small, to_well = direction(fabric, fabric.a, 0), direction(fabric, fabric.b, 0)
    assert found[to_small]["path_mtu"] == 1024, shown
    assert "packets of more than 1024 bytes do not arrive" in found[to_small]["problem"], shown
    assert [each for each in found.values() if each["problem"]] == [found[to_small]], shown
    assert {each["path_mtu"] for ends, each in found.items() if ends != to_small} == {4096}
    assert found[direction(fabric, fabric.a, 1)]["rate"] < 5e6 / 8 < found[to_well]["rate"], shown


@pytest.mark.soak
def test_rails_that_are_well(fabric: Fabric):
    """Output as JSON, and as a table of the rails that are named alone."""
    status, said = checked(fabric)
    assert (status, said["problems"]) == (0, []), json.dumps(said, indent=1)
    assert len(said["measured"]) == 4
    for each in said["measured"]:
        assert (each["reachable"], each["path_mtu"]) == (True, 4096)
        assert 0 < each["p50"] <= each["p99"]
        assert each["rate"] > 0
    done = run(fabric, "--device", "rxe1")
    assert done.rc == 0
    assert "| yes" in done.out and "rxe1/1" in done.out and "rxe0/1" not in done.out


@pytest.mark.soak
def test_rails_that_are_down_or_lead_nowhere(fabric: Fabric):
    cut, down = fabric.rail(fabric.a, 0), fabric.rail(fabric.a, 1)
    try:
        cut.drop_incoming()
        down.unplug()
        status, said = checked(fabric)
    finally:
        fabric.restore()
    shown = json.dumps(said, indent=1)
    assert status == 1
    found = by_ends(said)
    assert found.keys() == {direction(fabric, guest, 0) for guest in (fabric.a, fabric.b)}, shown
    for each in found.values():
        assert not each["reachable"] and "nothing arrives" in each["problem"], shown
    assert [rail["active"] for rail in said["hosts"]["localhost"]] == [True, False], shown
