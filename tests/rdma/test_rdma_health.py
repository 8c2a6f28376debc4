"""Health of real ports and a real link, judged as the controller judges it."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from guests import Fabric, Guest
from observing import tell
from peers import PATIENCE, Peer, linked, paths_text, until

from pipemorph.control import JobController
from pipemorph.protocol import RailHealth, RailSample, TransportSample
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer.telemetry.rail_sampler import read_rails
from pipemorph_trainer.telemetry.reporter import TransportSampler
from pipemorph_trainer.transport.message import Direction

pytestmark = pytest.mark.rdma

# No interpreter there: importing takes long on an emulated processor.
SYSFS = """
cd /sys/class/infiniband
for file in */ports/*/state */ports/*/link_layer */ports/*/*counters/*; do
    echo "$file=$(cat $file)"
done
"""
PORTS = 2


def ports_of(guest: Guest, folder: Path) -> list[RailSample]:
    """Ports as a rank there reads them, from a copy of what the kernel there shows."""
    for line in guest.sh(SYSFS).splitlines():
        name, _, text = line.partition("=")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    return read_rails(0, 0, folder, ["rxe0 port 1", "rxe1 port 1"])


def said_by(peer: Peer) -> list[TransportSample]:
    """Health report as the rank's own watch makes it, from the stats of a link in the guest."""
    stats = peer.stats()
    paths = [SimpleNamespace(**path) for path in stats["paths"]]
    link = SimpleNamespace(
        transport="rdma", stats=lambda: SimpleNamespace(**stats | {"paths": paths})
    )
    end: Any = SimpleNamespace(link=0, sends=Direction.FORWARD, engine_link=link)
    return TransportSampler([end], 0).take_changed()


class Judge:
    """A job of two stages, whose stage 0 is in guest a."""

    def __init__(self) -> None:
        op = {"forward": 1.0, "backwardInput": 1.0, "backwardWeight": 1.0}
        spec = {
            "parallelism": {"stages": 2},
            "schedule": {"microbatches": 2, "stageTimes": [op, op]},
            "trainer": {"module": "x", "iterations": 1},
        }
        self.controller = JobController(JobSpec.model_validate(spec))

    def hear(self, **telemetry: Any) -> None:
        tell(self.controller, time.time(), ports=PORTS, **telemetry)

    def rails(self) -> Any:
        return self.controller.get_job_view(time.time()).rails


def test_ports_that_go_down_and_a_link_that_falls_back_are_said(fabric: Fabric, tmp_path: Path):
    rails = [fabric.rail(fabric.a, n) for n in (0, 1)]
    judge = Judge()
    with linked(fabric) as link:
        link.rails_up(2)
        # A link whose rails take long to come up is on TCP until then.
        before = link.a.stats()
        judge.hear(rails=ports_of(fabric.a, tmp_path), transports=said_by(link.a))
        assert judge.rails().health is RailHealth.HEALTHY, judge.rails()
        assert judge.controller.get_job_view(0.0).transports.fallen == ()
        for rail in rails:
            rail.unplug()
        until(
            "the link is on TCP",
            lambda: link.a.stats()["transport"] == "tcp",
            PATIENCE,
            lambda: paths_text(link.a.stats()),
        )
        judge.hear(rails=ports_of(fabric.a, tmp_path), transports=said_by(link.a))
        faulty = judge.rails().faulty
        assert [port.device for port in faulty] == ["rxe0", "rxe1"]
        for port in faulty:
            assert port.what.startswith("is DOWN; ")
            assert "link_downed grew by 1 " in port.what
        (fallen,) = judge.controller.get_job_view(0.0).transports.fallen
        assert fallen.format_text(MeshShape(2)).startswith(
            "link 0 fell back from rdma to tcp (rxe0"
        )
        for rail in rails:
            rail.plug()
        link.rails_up(2)
        until(
            "a rail carries again",
            lambda: link.a.stats()["transport"] == "rdma",
            PATIENCE,
            lambda: paths_text(link.a.stats()),
        )
        counted = link.a.stats()
        fallbacks, failbacks = counted["fallbacks"], counted["failbacks"]
        assert (fallbacks > before["fallbacks"], failbacks > before["failbacks"]) == (True, True)
        judge.hear(rails=ports_of(fabric.a, tmp_path), transports=said_by(link.a))
    view = judge.controller.get_job_view(0.0).transports
    assert (view.fallen, view.fallbacks, view.failbacks) == ((), fallbacks, failbacks)
    # Ports are up again; the report that they were down stays for a while.
    assert [port.state for port in judge.rails().faulty] == ["ACTIVE", "ACTIVE"]
    events = [event.text for event in judge.controller.events]
    assert any(text.startswith("link 0 fell back") for text in events)
    assert "link 0 is back on rdma (forward)" in events
