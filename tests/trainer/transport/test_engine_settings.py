"""Settings of a job for the transfer engine reach the engine."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer import TrainerContext, settings
from pipemorph_trainer.topology.groups import ProcessGroups
from pipemorph_trainer.transport import engine_setup, rendezvous
from pipemorph_trainer.transport.link_recorder import OpClock
from pipemorph_trainer.transport.poller import Poller


def engine_settings(monkeypatch: pytest.MonkeyPatch, transport: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the engine that the only rank of a job makes."""
    made: list[dict[str, Any]] = []

    class Engine:
        rails_error = None
        port = 1

        def __init__(self, **given: Any) -> None:
            made.append(given)
            self.notifier_fd = os.eventfd(0)

        def refused(self) -> list[str]:
            return []

    for module in (engine_setup, settings):
        monkeypatch.setattr(module, "load_engine_module", lambda: SimpleNamespace(Engine=Engine))
    monkeypatch.setattr(rendezvous, "gather_values", lambda mine, _kind, _group: [mine])
    job = PipeMorphJob.model_validate(
        {
            "apiVersion": "pipemorph.io/v1alpha1",
            "kind": "PipeMorphJob",
            "metadata": {"name": "a-job"},
            "spec": {
                "parallelism": {"stages": 2},
                "schedule": {"microbatches": 4},
                "trainer": {"module": "m", "iterations": 1},
                "transport": transport,
            },
        }
    )
    context = TrainerContext(0, 2, 0, "127.0.0.1", 1, job=job, namespace="a-team", attempt=3)
    of_job = settings.Settings.from_spec(job.spec)
    plan = of_job.make_initial_plan()
    config = rendezvous.LinkConfig(
        secret=b"the job's secret",
        device=torch.device("cpu"),
        deadline=5.0,
        poller=Poller(),
        op_clock=OpClock(),
        begin_wait=lambda _: None,
        end_wait=lambda: None,
        engine=settings.choose_engine_options(context, of_job, plan, directed=False),
    )
    found = rendezvous.connect_neighbours(
        MeshShape().find_coordinate(0), config, master_addr="127.0.0.1", groups=ProcessGroups()
    )
    assert isinstance(found.engine, Engine)
    os.close(found.engine.notifier_fd)
    (given,) = made
    return given


def test_the_engine_gets_the_settings_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    rdma = {
        "devices": ["mlx5_0", "mlx5_1:2"], "gidIndex": 3, "trafficClass": 104, "serviceLevel": 5,
        "queuePairs": 4,
    }  # fmt: skip
    transport = {"engine": "rdma", "require": "rdma", "rdma": rdma}
    assert engine_settings(monkeypatch, transport) == {
        "job": "a-team/a-job/3/0", "rank": 0, "secret": b"the job's secret", "host": "127.0.0.1",
        "queues": 8, "transport": "rdma", "require": "rdma",
        "rdma_devices": ["mlx5_0", "mlx5_1:2"], "gid_index": 3, "traffic_class": 104,
        "service_level": 5, "integrity": "crc", "queue_pairs": 4,
    }  # fmt: skip
    assert engine_settings(monkeypatch, {"integrity": "aead"})["integrity"] == "aead"


def test_settings_that_the_job_omits_stay_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    given = engine_settings(monkeypatch, {"rdma": {"gidIndex": 0}})
    assert given["gid_index"] == 0  # an entry as good as any other
    given = engine_settings(monkeypatch, {})
    assert (given["transport"], given["require"]) == ("auto", None)
    assert (given["rdma_devices"], given["gid_index"]) == ([], -1)
    assert (given["traffic_class"], given["service_level"]) == (0, 0)
    assert given["queue_pairs"] == 1
