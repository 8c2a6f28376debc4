"""What a job says of the transfer engine is what the engine is told."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipemorph.api.mesh import MeshShape
from pipemorph.api.spec import PipeMorphJob
from pipemorph_trainer import TrainerContext, settings
from pipemorph_trainer.links import engine, rendezvous
from pipemorph_trainer.links.poller import Poller
from pipemorph_trainer.links.recorder import OpClock
from pipemorph_trainer.topology.groups import Groups


def told(monkeypatch: pytest.MonkeyPatch, transport: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the engine that the only rank of a job makes."""
    made: list[dict[str, Any]] = []

    class Engine:
        rails_trouble = None
        port = 1

        def __init__(self, **given: Any) -> None:
            made.append(given)
            self.bell_fd = os.eventfd(0)

        def refused(self) -> list[str]:
            return []

    for module in (engine, settings):
        monkeypatch.setattr(module, "engine_module", lambda: SimpleNamespace(Engine=Engine))
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
    of_job = settings.Settings.of(job.spec)
    plan = of_job.plan()
    config = rendezvous.LinkConfig(
        secret=b"the job's secret",
        device=torch.device("cpu"),
        deadline=5.0,
        poller=Poller(),
        op_clock=OpClock(),
        begin_wait=lambda _: None,
        end_wait=lambda: None,
        engine=settings.engine_options(context, of_job, plan, directed=False),
    )
    found = rendezvous.meet(
        MeshShape().coordinate(0), config, master_addr="127.0.0.1", groups=Groups()
    )
    assert isinstance(found.engine, Engine)
    os.close(found.engine.bell_fd)
    (given,) = made
    return given


def test_the_engine_is_told_what_the_job_says(monkeypatch: pytest.MonkeyPatch) -> None:
    rdma = {
        "devices": ["mlx5_0", "mlx5_1:2"], "gidIndex": 3, "trafficClass": 104, "serviceLevel": 5,
        "queuePairs": 4,
    }  # fmt: skip
    transport = {"engine": "rdma", "require": "rdma", "rdma": rdma}
    assert told(monkeypatch, transport) == {
        "job": "a-team/a-job/3/0", "rank": 0, "secret": b"the job's secret", "host": "127.0.0.1",
        "queues": 8, "transport": "rdma", "require": "rdma",
        "rdma_devices": ["mlx5_0", "mlx5_1:2"], "gid_index": 3, "traffic_class": 104,
        "service_level": 5, "integrity": "crc", "queue_pairs": 4,
    }  # fmt: skip
    assert told(monkeypatch, {"integrity": "aead"})["integrity"] == "aead"


def test_what_the_job_leaves_open_is_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    given = told(monkeypatch, {"rdma": {"gidIndex": 0}})
    assert given["gid_index"] == 0  # an entry as good as any other
    given = told(monkeypatch, {})
    assert (given["transport"], given["require"]) == ("auto", None)
    assert (given["rdma_devices"], given["gid_index"]) == ([], -1)
    assert (given["traffic_class"], given["service_level"]) == (0, 0)
    assert given["queue_pairs"] == 1
