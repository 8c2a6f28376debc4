"""`pipemorph fabric check` between two hosts whose rails are well, slow, lossy, small or cut.

The faults are the kernel's; that it made them is read from its own counters.
"""

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from guests import Done, Fabric, Guest, Rail
from pydantic import TypeAdapter

from pipemorph.wire import FabricView

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(600)]

COMMAND = (sys.executable, "-m", "pipemorph.cli", "fabric", "check")
SECRET = "/run/check.secret"
PORT = 29610
DEADLINE = 240.0
Ends = tuple[str, str, str, str]


def write_secrets(fabric: Fabric, a: str = "5" * 32, b: str = "5" * 32) -> None:
    for guest, secret in ((fabric.a, a), (fabric.b, b)):
        guest.sh(f"echo {secret} > {SECRET}; chmod 600 {SECRET}")


@contextmanager
def listening(fabric: Fabric, *argv: str) -> Iterator[None]:
    """Guest b takes part, and ends well when the check does."""
    address = fabric.CONTROL["b"]
    task = fabric.b.spawn(*COMMAND, "--listen", address, "--secret-file", SECRET, *argv)
    try:
        yield
        assert task.reap(DEADLINE) == 0
    finally:
        task.kill()


def checked(fabric: Fabric, *argv: str) -> tuple[int, dict[str, Any]]:
    """Guest a leads."""
    with listening(fabric):
        where = ("--hosts", fabric.CONTROL["b"], "--secret-file", SECRET, "--wait", "120")
        done = fabric.a.try_run(*COMMAND, *where, "--output", "json", *argv, deadline=DEADLINE)
        assert done.rc in (0, 1), done.err
    assert done.err == ""
    return done.rc, json.loads(done.out)


def direction(fabric: Fabric, source: Guest, rail: int) -> Ends:
    """Of what goes out of a guest: host and port of both ends, as the check names them."""
    names = {"a": "a", "b": fabric.CONTROL["b"]}
    target = "b" if source.name == "a" else "a"
    return names[source.name], f"rxe{rail}/1", names[target], f"rxe{rail}/1"


def kinds(said: dict[str, Any]) -> dict[Ends, set[str]]:
    """What was found of each direction."""
    out: dict[Ends, set[str]] = {}
    for finding in said["findings"]:
        source, target = finding["source"], finding["target"] or {"host": "", "rail": ""}
        ends = source["host"], source["rail"], target["host"], target["rail"]
        out.setdefault(ends, set()).add(finding["kind"])
    return out


def drop_every(rail: Rail, number: int) -> None:
    """Of the RoCE packets that come in."""
    rail.guest.sh(
        f"tc qdisc replace dev {rail.netdev} clsact; "
        f"tc filter add dev {rail.netdev} ingress protocol ip u32 match ip dport 4791 0xffff "
        f"action pass random determ drop {number}"
    )


def drop_large(rail: Rail) -> None:
    """Of the packets that come in, those of 2,048 bytes or more: as a switch on the way does whose
    MTU is smaller than the ports'. u32 compares bits, so one filter for each bit."""
    rail.guest.sh(
        f"tc qdisc replace dev {rail.netdev} clsact\n"
        + "\n".join(
            f"tc filter add dev {rail.netdev} ingress protocol ip u32 match ip dport 4791 0xffff "
            f"match u16 {bit:#x} {bit:#x} at 2 action drop"
            for bit in (0x800, 0x1000)
        )
    )


def test_the_rails_made_slow_lossy_and_small_of_mtu_are_found(fabric: Fabric):
    write_secrets(fabric)
    small, lossy = fabric.rail(fabric.b, 0), fabric.rail(fabric.a, 1)
    slow = lossy
    try:
        drop_large(small)
        slow.slow("5mbit")
        drop_every(lossy, 40)
        status, said = checked(fabric)
        dropped = lossy.dropped()
    finally:
        fabric.restore()
    found = kinds(said)
    shown = json.dumps(said, indent=1)
    assert status == 1
    assert dropped >= 3
    assert "mtu" in found[direction(fabric, fabric.a, 0)], shown
    assert "slow" in found[direction(fabric, fabric.a, 1)], shown
    assert "lossy" in found[direction(fabric, fabric.b, 1)], shown
    # An emulated processor that others keep busy may answer late on any rail.
    assert found.get(direction(fabric, fabric.b, 0), set()) <= {"late"}, shown
    mtus = {m["source"]["host"] + m["source"]["rail"]: m["path_mtu"] for m in said["measured"]}
    assert mtus["arxe0/1"] == 1024
    assert {mtus["arxe1/1"], mtus[f"{fabric.CONTROL['b']}rxe0/1"]} == {4096}


@pytest.mark.soak
def test_rails_that_are_well(fabric: Fabric):
    """In a page; and by the rails that are named alone."""
    write_secrets(fabric)
    status, said = checked(fabric)
    assert (status, said["findings"]) == (0, []), json.dumps(said, indent=1)
    assert len(said["measured"]) == 4
    for each in said["measured"]:
        assert each["path_mtu"] == 4096
        assert 0 < each["p50"] <= each["p99"]
        assert each["rate"] > 0
    page = "/run/check.html"
    with listening(fabric):
        where = ("--hosts", fabric.CONTROL["b"], "--secret-file", SECRET)
        done = fabric.a.try_run(
            *COMMAND, *where, "--device", "rxe1", "--out", page, deadline=DEADLINE
        )
    assert (done.rc, done.err) == (0, "")
    text = fabric.a.read(page)
    assert "rxe1/1" in text and "rxe0/1" not in text


@pytest.mark.soak
def test_rails_that_are_down_or_lead_nowhere(fabric: Fabric):
    write_secrets(fabric)
    cut, down = fabric.rail(fabric.a, 0), fabric.rail(fabric.a, 1)
    try:
        cut.drop_incoming()
        down.unplug()
        status, said = checked(fabric)
    finally:
        fabric.restore()
    shown = json.dumps(said, indent=1)
    assert status == 1
    found = kinds(said)
    assert found[direction(fabric, fabric.a, 0)] == {"unreachable"}, shown
    assert found[direction(fabric, fabric.b, 0)] == {"unreachable"}, shown
    assert found["a", "rxe1/1", "", ""] == {"down"}, shown


@pytest.mark.soak
def test_a_port_whose_mtu_is_smaller_than_its_peers(fabric: Fabric):
    write_secrets(fabric)
    try:
        fabric.b.sh(f"ip link set {fabric.rail(fabric.b, 1).netdev} mtu 1500")
        status, said = checked(fabric)
    finally:
        fabric.restore()
    assert status == 1
    b = fabric.CONTROL["b"]
    assert kinds(said)[b, "rxe1/1", "", ""] == {"mtu"}, json.dumps(said, indent=1)
    assert said["hosts"]["a"][1]["mtu"] == 4096


@pytest.mark.soak
def test_a_host_with_another_secret_is_refused(fabric: Fabric):
    write_secrets(fabric, b="6" * 32)
    listener = fabric.b.spawn(
        *COMMAND, "--listen", fabric.CONTROL["b"], "--secret-file", SECRET, "--wait", "60"
    )
    try:
        done = fabric.a.try_run(
            *COMMAND, "--hosts", fabric.CONTROL["b"], "--secret-file", SECRET, deadline=DEADLINE
        )
    finally:
        listener.kill()
    assert (done.rc, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert line.startswith(f"pipemorph fabric: {fabric.CONTROL['b']}: ")
    assert "is the secret file the same on both hosts?" in line


@pytest.mark.soak
def test_the_pods_of_a_job_check_their_rails_before_they_start(fabric: Fabric):
    """Each guest plays a pod of two ranks, by the preflight's own command line."""
    write_secrets(fabric)
    show = "import os; print(os.environ.get('PIPEMORPH_FABRIC', 'none'))"
    preflight = (sys.executable, "-m", "pipemorph_trainer.preflight", "--fabric=require")
    env = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": fabric.CONTROL["a"]}
    env |= {"PIPEMORPH_SECRET_FILE": SECRET}

    def pods(*argv: str) -> list[Done]:
        """Both at once."""
        command = (*preflight, *argv, "--", sys.executable, "-c", show)
        with ThreadPoolExecutor() as pool:
            started = [
                pool.submit(
                    guest.try_run,
                    *command,
                    env=env | {"PIPEMORPH_POD_INDEX": f"{index}"},
                    deadline=DEADLINE,
                )
                for index, guest in enumerate((fabric.a, fabric.b))
            ]
            return [each.result() for each in started]

    first, second = pods("--device=rxe1")
    assert (first.rc, second.rc) == (0, 0), first.err + second.err
    view = TypeAdapter(FabricView).validate_json(first.out)
    assert (view.pods, view.directions, view.sick, view.message) == (2, 2, (), "")
    assert second.out == "none\n"
    drop_large(fabric.rail(fabric.b, 1))
    try:
        first, second = pods()
    finally:
        fabric.restore()
    assert (first.rc, first.out, second.rc) == (78, "", 0), first.err + second.err
    assert "pod 0 rxe1/1 → pod 1 rxe1/1: packets of more than 1024 bytes do not arrive" in first.err
