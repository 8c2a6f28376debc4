"""`pipemorph doctor` on a machine that has RDMA devices, healthy and not.

With the files of such a machine `tests/core/discovery/test_doctor.py` shows the same."""

import json
import sys
from typing import Any

import pytest
from guests import Fabric, Guest

pytestmark = [pytest.mark.rdma, pytest.mark.soak]

# Importing torch takes minutes on an emulated processor, and is not what this is about.
DOCTOR = """
import sys
from pipemorph.cli import main
from pipemorph.commands import doctor
doctor.query_trainer_facts = lambda: (None, "not checked")
sys.exit(main(["doctor", "--require", "rdma", "--output", "json"]))
"""


def examine(guest: Guest) -> tuple[int, dict[str, Any]]:
    done = guest.try_run(sys.executable, "-c", DOCTOR, deadline=120)
    assert done.out, done.err
    return done.rc, json.loads(done.out)


def verdicts(said: dict[str, Any]) -> dict[str, str]:
    return {c["name"]: c["verdict"] for c in said["checks"]}


def test_the_doctor_sees_rails_addresses_counters_and_what_ails_them(fabric: Fabric):
    first, second = fabric.rail(fabric.a, 0), fabric.rail(fabric.a, 1)
    status, said = examine(fabric.a)
    assert status == 0, said["missing"]
    assert [d["name"] for d in said["devices"]] == ["rxe0", "rxe1"]
    for rail, device in zip((first, second), said["devices"], strict=True):
        (port,) = device["ports"]
        assert port["state"] == "ACTIVE"
        assert port["link_layer"] == "Ethernet"
        best = port["gids"][0]
        assert best["address"] == f"::ffff:{rail.address}"
        assert best["type"] == "RoCE v2"
        assert best["netdev"] == rail.netdev
        # Counters of the kernel; those of mlx5 are not shown for rxe, not even as unavailable.
        assert port["counters"]["link_downed"] == rail.counter("link_downed")
        assert "out_of_sequence" not in port["counters"]
        # The distribution's pyverbs is among what the guests need.
        assert port["active_mtu"] == 4096
    assert verdicts(said)["libibverbs"] == "ok"
    assert verdicts(said)["verbs devices"] == "ok"
    try:
        first.unplug()
        status, said = examine(fabric.a)
        assert status == 0, said["missing"]  # one rail is enough
        assert verdicts(said)["port rxe0/1"] == "warning"
        assert verdicts(said)["port rxe1/1"] == "ok"
        second.unplug()
        status, said = examine(fabric.a)
        assert status == 1
        assert "RDMA devices" in said["missing"]
        assert "port rxe1/1" in said["missing"]
    finally:
        fabric.restore()
