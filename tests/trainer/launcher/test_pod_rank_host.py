"""Decisions of a launcher for its pod, by given answers of the ingest; without processes."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from manifests import manifest_of

from pipemorph.exits import EXIT_SAVED, EXIT_SIGTERM
from pipemorph.local.generation_runner import RankGeneration
from pipemorph.local.processes.interrupts import InterruptHandler
from pipemorph.local.processes.supervision import AttemptOutcome, AttemptResult
from pipemorph.protocol import GenerationState, PodFailure
from pipemorph.spec.layout import RankLayout
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.launcher.pod import Pod
from pipemorph_trainer.launcher.pod_rank_host import PodRankHost, choose_exit_code
from pipemorph_trainer.launcher.restart_client import RestartClient

PODS = 2
NEXT = GenerationState(attempt=0, generation=1)
SIGTERM = "SIGTERM"


class ScriptedRestartClient(RestartClient):
    """Answers as ``meets`` says, and records the losses that it is given."""

    def __init__(self, meets: Callable[[], GenerationState | str]) -> None:
        self.missed_generation, self.meets, self.url = False, meets, "https://ingest:8443"
        self.losses: list[PodFailure | None] = []

    def wait_for_next_generation(
        self, generation: int, loss: PodFailure | None, *_: Any, **__: Any
    ) -> GenerationState | str:
        self.losses.append(loss)
        return self.meets()

    def join_attempt(self, *_: Any, **__: Any) -> GenerationState | str:
        return self.meets()


def pod_of(folder: Path, index: int, secret: str = "", **cut: Any) -> Pod:
    spec = {
        "parallelism": {"stages": 2, "replicas": 2, "ranksPerPod": 2, **cut},
        "schedule": {"microbatches": 4},
        "trainer": {"module": "m", "iterations": 7},
        "failurePolicy": {"maxRestarts": 1},
    }
    (folder / "job.json").write_text(json.dumps(manifest_of(spec)))
    given = {
        "PIPEMORPH_POD_INDEX": str(index),
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": str(2 * PODS),
        "MASTER_ADDR": "gpt-0.svc",
        "MASTER_PORT": "29500",
        "PIPEMORPH_JOB_FILE": str(folder / "job.json"),
        "PIPEMORPH_KEPT_DIR": str(folder),
        "PIPEMORPH_POD_ADDRESS": "gpt-{}.svc",
    }
    if secret:
        (folder / "secret").write_text(secret)
        given["PIPEMORPH_SECRET_FILE"] = str(folder / "secret")
    return Pod.from_env(given)


@contextmanager
def site_of(pod: Pod, met: RestartClient | None = None) -> Iterator[PodRankHost]:
    with InterruptHandler(SimpleQueue()) as interrupts:
        yield PodRankHost(pod, [], 1.0, SimpleQueue(), interrupts, met, environ={})


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("when", ["before its ranks end", "while it waits for the other pods"])
def test_every_pod_that_gets_sigterm_exits_with_the_code_of_ranks_that_saved(
    when: str, saved: bool, tmp_path: Path
) -> None:
    """The job is suspended: some pods get SIGTERM while they already wait for the others."""

    def meets() -> GenerationState | str:
        os.kill(os.getpid(), signal.SIGTERM)
        return "the wait was interrupted"

    met = ScriptedRestartClient(meets)
    with site_of(pod_of(tmp_path, 1), met) as site:
        if when == "before its ranks end":
            os.kill(os.getpid(), signal.SIGTERM)
            ending = AttemptResult(AttemptOutcome.INTERRUPTED, SIGTERM, saved=saved)
        else:
            ending = AttemptResult(
                AttemptOutcome.INTERRUPTED if saved else AttemptOutcome.FAILED, SIGTERM, saved=saved
            )
        ended = site.agree_next_generation(RankGeneration(generation=0), ending)
    assert isinstance(ended, AttemptResult) and ended.outcome is AttemptOutcome.INTERRUPTED
    assert choose_exit_code(ended) == (EXIT_SAVED if saved else EXIT_SIGTERM)
    assert len(met.losses) == (when != "before its ranks end")


def test_a_pod_whose_ranks_saved_for_another_pod_goes_on_with_the_next_generation(
    tmp_path: Path,
) -> None:
    met = ScriptedRestartClient(lambda: NEXT)
    with site_of(pod_of(tmp_path, 1), met) as site:
        found = site.agree_next_generation(
            RankGeneration(generation=0),
            AttemptResult(AttemptOutcome.INTERRUPTED, SIGTERM, saved=True),
        )
    assert found == RankGeneration(generation=1)
    (loss,) = met.losses
    assert loss is not None and loss.retry and loss.lost_peer
    assert loss.reason == f"the ranks saved and ended with those of another pod ({SIGTERM})"


def test_pods_have_one_secret_per_generation(tmp_path: Path) -> None:
    """Ranks of an earlier generation, on a node that was away, must not reach those of this one."""
    found: dict[int, set[bytes]] = {}
    for index in range(PODS):
        folder = tmp_path / str(index)
        folder.mkdir()
        pod = pod_of(folder, index, secret="of the attempt")
        with site_of(pod, ScriptedRestartClient(lambda: NEXT)) as site:
            for generation in range(3):
                with site.share_resources(RankGeneration(generation=generation)) as env:
                    file = env.get("PIPEMORPH_SECRET_FILE")
                    if file is None:
                        assert generation == 0, "it has the one that the operator has mounted"
                        continue
                    assert stat.S_IMODE(Path(file).stat().st_mode) == 0o600
                    rank = {
                        **pod.make_rank_environment(0, env),
                        "MASTER_PORT": "1",
                        "WORLD_SIZE": "4",
                    }
                    secret = TrainerContext.from_env(rank).secret
                    assert secret == Path(file).read_bytes()
                    found.setdefault(generation, set()).add(secret)
                assert not Path(file).exists(), "it goes with its generation"
    assert [len(found[generation]) for generation in (1, 2)] == [1, 1], "the same in all pods"
    assert len({b"of the attempt"}.union(*found.values())) == 3, "and another one in each"


def begin(pod: Pod, *answers: GenerationState | str) -> RankGeneration | AttemptResult:
    """``answers``: those of the ingest, one by one."""
    with site_of(pod, ScriptedRestartClient(iter(answers).__next__)) as site:
        return site.choose_first_generation()


def test_a_pod_has_the_ranks_at_its_places(tmp_path: Path) -> None:
    pod = pod_of(tmp_path, 1)
    layout = RankLayout(places=(2, 3, 0, 1, *range(4, pod.parallelism.world_size)))
    life = begin(pod, GenerationState(attempt=0, generation=1, layout=layout))
    assert life == RankGeneration(generation=1, layout=layout)
    assert isinstance(life, RankGeneration)
    with site_of(pod) as site:
        # Neither the job's size nor its batch is another one.
        assert site._make_changed_environment(tmp_path, life) == {"MASTER_ADDR": "gpt-1.svc"}
    within = pod.select_generation(life)
    assert (within.ranks, within.job) == ((0, 1), pod.job)
    env = within.make_rank_environment(1, {})
    assert (env["RANK"], env["PIPEMORPH_PLACE"]) == ("1", "3")


def test_an_omitted_pod_ends_with_the_job_and_by_itself_as_a_lost_pod(
    tmp_path: Path,
) -> None:
    pod = pod_of(tmp_path, 1, minReplicas=1, order=["dp_replicate", "pp"])
    without = GenerationState(attempt=0, generation=1, excluded_replicas=(1,))
    assert begin(pod, without, NEXT) == RankGeneration(generation=1), "when its replica runs again"
    done = without.model_copy(update={"verdict": "completed"})
    for answers in ((done,), (without, done)):
        ending = begin(pod, *answers)
        assert isinstance(ending, AttemptResult) and choose_exit_code(ending) == 0
    refused = begin(pod, without, "the ingest refuses this pod")
    assert isinstance(refused, AttemptResult) and choose_exit_code(refused) == EXIT_SIGTERM
    over = without.model_copy(update={"verdict": "attempt", "why": "maxRestarts is 1", "cause": 1})
    ended = begin(pod, without, over)
    assert isinstance(ended, AttemptResult) and choose_exit_code(ended) == 1
    assert ended.reason == "the attempt ends: maxRestarts is 1"


def test_no_pod_starts_ranks_of_which_it_does_not_know_the_generation(tmp_path: Path) -> None:
    ending = begin(pod_of(tmp_path, 1), "no ingest accepts this pod: timed out (waited 300 s)")
    assert isinstance(ending, AttemptResult)
    assert choose_exit_code(ending) == EXIT_SIGTERM, (
        "the host makes it again, and it does not count"
    )
    assert ending.format_lines().splitlines() == [
        "no ingest accepts this pod: timed out (waited 300 s)",
        "  the ingest holds the number of the running generation: check that it runs, and that"
        " this pod reaches https://ingest:8443",
    ]
