"""Megatron-Core, DeepSpeed and torchtitan train under observation as without it. Their packages are
those of ``make soak``."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from launch import run_ranks
from observed_pipelines import read_rows
from other_frameworks import LENGTH, MICROBATCHES, WIDTH, FrameworkRun, train_framework
from soak_packages import require_package
from titan_job import TitanJob, TitanRun, train

from pipemorph.diagnose.diagnosis import diagnose
from pipemorph.diagnose.formats.registry import load_recording
from pipemorph.local.results.journal import RunJournal
from pipemorph.local.service import ControlService
from pipemorph_trainer import TrainerContext, observe

pytestmark = pytest.mark.soak


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("run", "ranks"),
    [
        (FrameworkRun("megatron"), 2),
        (FrameworkRun("megatron"), 3),
        (FrameworkRun("megatron", chunks=2), 3),
        (FrameworkRun("megatron", chunks=2, overlap=True), 2),
        (FrameworkRun("megatron", replicas=2, tied=True), 4),
        (FrameworkRun("megatron", chunks=2, overlap=True, replicas=2), 4),
        (FrameworkRun("deepspeed"), 2),
    ],
    ids=[
        "megatron-2",
        "megatron-3",
        "megatron-virtual",
        "megatron-overlap",
        "megatron-replicas",
        "megatron-overlapped-replicas",
        "deepspeed",
    ],
)
def test_training_is_equal_to_the_bit_and_every_op_is_recorded(
    tmp_path: Path, run: FrameworkRun, ranks: int
) -> None:
    require_package(run.framework)
    observed = run_ranks(ranks, train_framework, run, str(tmp_path), timeout=280)
    plain = run_ranks(
        ranks, train_framework, run._replace(observed=False), str(tmp_path), timeout=280
    )
    assert observed == plain
    assert any(rank["losses"] for rank in observed)
    rows = read_rows(tmp_path)
    stages = ranks // run.replicas
    chunks = stages * run.chunks

    def check_ops(optype: str, among: Iterable[int]) -> None:
        ops = [
            (r["step"], r["dp_rank"], r["gmc"], r["mb_id"]) for r in rows if r["optype"] == optype
        ]
        expected = product((1, 2), range(run.replicas), among, range(MICROBATCHES))
        assert sorted(ops) == list(expected), optype

    check_ops("forward-compute", range(chunks))
    check_ops("backward-compute", range(chunks))
    check_ops("forward-recv", range(1, chunks))
    check_ops("forward-send", range(chunks - 1))
    check_ops("backward-recv", range(chunks - 1))
    check_ops("backward-send", range(1, chunks))
    sizes = {row["bytes"] for row in rows if row["optype"].endswith(("-send", "-recv"))}
    # Of Megatron a message has two sequences, and of DeepSpeed four vectors.
    assert sizes == {4 * WIDTH * (2 * LENGTH if run.framework == "megatron" else 4)}
    counts = Counter(row["optype"] for row in rows)
    assert counts["optimizer"] == 2 * ranks
    if run.replicas > 1:
        assert counts["grads-reduce-scatter"] == 2 * ranks * run.chunks
    # DeepSpeed has the instruction in each step, also without tied weights.
    reduces = run.tied or run.framework == "deepspeed"
    assert counts["embedding-grads-all-reduce"] == (2 * 2 * run.replicas if reduces else 0)
    found = diagnose(load_recording([tmp_path]))
    assert (found.steps.stages, found.steps.replicas) == (stages, run.replicas)
    name = found.schedule.removeprefix("megatron-core ").removeprefix("deepspeed ")
    assert name.startswith(
        "forward_backward_pipelining_with" if "mega" in run.framework else "Pipe"
    )


def train_and_report(
    context: TrainerContext, run: FrameworkRun, host: tuple[str, str], folder: str
) -> dict[str, Any]:
    """Train on this rank, observed by ``pipemorph serve`` at a URL with a token file."""
    os.environ |= dict(zip(("PIPEMORPH_INGEST_URL", "PIPEMORPH_TOKEN_FILE"), host, strict=True))
    return train_framework(context, run, folder)


@pytest.mark.parametrize("framework", ["megatron", "deepspeed"])
def test_steps_reach_serve(tmp_path: Path, framework: str) -> None:
    require_package(framework)
    token, journal = tmp_path / "token", RunJournal()
    with ControlService(None, journal) as service:
        token.write_text(service.token)
        host, folder = (service.url, str(token)), str(tmp_path / "ops")
        run_ranks(2, train_and_report, FrameworkRun(framework), host, folder, timeout=280)
        assert service.observed is not None
        assert service.observed.finished
        controller = service.observed.controller
    assert controller is not None
    assert controller.running_plan.warmup == (2, 1)
    assert [each.index for each in journal.list_iterations()] == [1, 2]


def train_titan(context: TrainerContext, job: TitanJob, folder: str) -> TitanRun:
    """Train on this rank, observed if there is a folder."""
    observation = observe(folder) if folder else None
    run = train(context, job)
    if observation is not None:
        assert observation.active
        observation.stop()
    return run


@pytest.mark.timeout(600)
def test_torchtitan_is_equal_to_the_bit(tmp_path: Path) -> None:
    require_package("torchtitan")
    job = TitanJob(adaptive=False, shard=2)
    observed = run_ranks(4, train_titan, job, str(tmp_path), timeout=280)
    assert observed == run_ranks(4, train_titan, job, "", timeout=280)
    rows = read_rows(tmp_path)
    places = {(row["stage"], row["dp_rank"]) for row in rows}
    assert places == {(0, 0), (0, 1), (1, 0), (1, 1)}
    found = diagnose(load_recording([tmp_path]))
    assert (found.steps.stages, found.steps.replicas) == (2, 2)
    assert found.schedule == "torchtitan Schedule1F1B"
    assert any(row["optype"] == "grads-reduce-scatter" for row in rows)
