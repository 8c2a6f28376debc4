"""Observed torch pipelines report to ``pipemorph serve --observe``, and train as without it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist
from launch import run_ranks
from slow_link_pipelines import SlowLinkRun, train_slow_link

from pipemorph.local.results.journal import RunJournal
from pipemorph.local.service import ControlService
from pipemorph.protocol import Health
from pipemorph_trainer import TrainerContext, observe


def train(context: TrainerContext, run: SlowLinkRun, url: str, token: str, folder: str) -> str:
    """Train on this rank, observed if there is a URL."""
    observation = None
    if url:
        os.environ |= {"PIPEMORPH_INGEST_URL": url, "PIPEMORPH_TOKEN_FILE": token}
        observation = observe(folder)
    address = f"tcp://127.0.0.1:{context.master_port}"
    dist.init_process_group("gloo", address, rank=context.rank, world_size=context.world_size)
    hashed = train_slow_link(run)
    if observation is not None:
        assert observation.active
        observation.stop()
    dist.destroy_process_group()
    return hashed


@pytest.mark.parametrize(
    ("ranks", "run"),
    [
        (2, SlowLinkRun(steps=18, link=0, delay=0.04, late_from=10)),
        pytest.param(
            4, SlowLinkRun(steps=60, link=2, delay=0.06, late_from=25, forward=0.01),
            marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_a_late_link_of_a_plain_torch_job_is_named(
    tmp_path: Path, ranks: int, run: SlowLinkRun
) -> None:
    token = tmp_path / "token"
    journal = RunJournal()
    with ControlService(None, journal) as service:
        token.write_text(service.token)
        observed = run_ranks(ranks, train, run, service.url, str(token), str(tmp_path / "ops"))
        assert service.observed is not None
        assert service.observed.finished
        job = service.observed.job
    assert job is not None
    assert job.spec.schedule.policy == "1f1b"
    slow = [link for link in journal.view.links if link.health is Health.SLOW]
    worst = max(slow, key=lambda link: link.delay)
    assert worst.link == run.link
    assert worst.delay == pytest.approx(run.delay, rel=0.3)
    periods = [
        each
        for each in journal.copy_link_history().list_slow_periods()
        if each.link == run.link and each.end is None
    ]
    assert periods[0].begin <= run.late_from + 2
    assert len(journal.list_iterations()) == run.steps - 1, "the first step has set-up"
    if ranks == 2:
        assert observed == run_ranks(ranks, train, run, "", "", "")
