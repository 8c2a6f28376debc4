"""Observed torch pipelines report to ``pipemorph serve --observe``, and train as without it."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from launch import free_port, run_ranks
from observed_pipelines import break_observation
from slow_link_pipelines import SlowLinkRun, train_slow_link

from pipemorph.local.results.journal import RunJournal
from pipemorph.local.service import ControlService
from pipemorph.protocol import Health
from pipemorph_trainer import TrainerContext, observe


def train(
    context: TrainerContext, run: SlowLinkRun, host: tuple[str, str], folder: str, breaks: str = ""
) -> str:
    """Train on this rank, observed if there is a host: its URL and token file. ``breaks``: what
    fails of the recording, see :func:`break_observation`."""
    observation, (url, token) = None, host
    if url:
        os.environ |= {"PIPEMORPH_INGEST_URL": url, "PIPEMORPH_TOKEN_FILE": token}
        observation = observe(folder)
        if breaks:
            break_observation(breaks, folder)
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
        (2, SlowLinkRun(steps=20, link=0, delay=0.04, late_from=8)),
        *(
            pytest.param(
                2, SlowLinkRun(
                    steps=24, link=0, delay=0.04, late_from=8, tensors=2, narrow=is_narrow
                ),
                marks=pytest.mark.full,
            )
            for is_narrow in (False, True)
        ),
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
        observed = run_ranks(ranks, train, run, (service.url, str(token)), str(tmp_path / "ops"))
        assert service.observed is not None
        assert service.observed.finished
        job = service.observed.job
        steps = [step for ranks in service.observed.newest for step in ranks.values()]
    assert any(step.waits for step in steps)
    assert job is not None
    assert job.spec.schedule.policy == "1f1b"
    slow = [link for link in journal.view.links if link.health is Health.SLOW]
    worst = max(slow, key=lambda link: link.delay)
    assert worst.link == run.link
    assert worst.delay == pytest.approx(run.delay, rel=0.3)
    assert (worst.transfer > 0) is run.narrow
    periods = [
        each
        for each in journal.copy_link_history().list_slow_periods()
        if each.link == run.link and each.end is None
    ]
    # On a busy machine the link may be found some steps later.
    assert periods[0].begin <= run.late_from + 8
    assert len(journal.list_iterations()) == run.steps - 1, "the first step has set-up"
    if ranks == 2 and run.tensors == 1:
        # Late messages change no numbers.
        prompt = replace(run, late_from=run.steps)
        assert observed == run_ranks(ranks, train, prompt, ("", ""), "")


@pytest.mark.full
@pytest.mark.parametrize("fault", ["absent", "token", "back", "disk"])
def test_training_goes_on_whatever_the_host_does(tmp_path: Path, fault: str) -> None:
    run = SlowLinkRun(steps=60, late_from=99)
    token, port = tmp_path / "token", free_port()
    token.write_text("secret")
    journals = RunJournal(), RunJournal()

    def host(journal: RunJournal) -> ControlService:
        return ControlService(
            None, journal, token="another" if fault == "token" else "secret", port=port
        )

    def serve_twice() -> None:
        deadline = time.monotonic() + 60
        with host(journals[0]):
            while not journals[0].count_done() and time.monotonic() < deadline:
                if done.wait(0.01):
                    break
        with host(journals[1]):
            while not done.wait(0.1) and time.monotonic() < deadline:
                pass

    done, server = threading.Event(), threading.Thread(target=serve_twice)
    if fault != "absent":
        server.start()
    arguments = run, (f"http://127.0.0.1:{port}", str(token)), str(tmp_path / "ops")
    try:
        found = run_ranks(2, train, *arguments, "disk" if fault == "disk" else "")
    finally:
        done.set()
    if fault != "absent":
        server.join()
    assert found == run_ranks(2, train, run, ("", ""), "")
    steps = [[each.index for each in journal.list_iterations()] for journal in journals]
    if fault in ("absent", "token"):
        assert steps == [[], []]
    else:
        assert steps[1][-1] == run.steps - 1, "reports go on at the host that is back"
