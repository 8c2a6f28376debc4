"""Torch's own pipelines train under observation as without it, and every op is recorded."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from launch import run_ranks
from observed_pipelines import WIDTH, ObservedRun, read_rows, train_observed
from profiled_pipelines import SCHEDULES

PROGRAM = Path(__file__).parents[2] / "support" / "observed_pipelines.py"


def train_twice(
    tmp_path: Path, run: ObservedRun, ranks: int = 2
) -> tuple[list[dict[str, Any]], list[bool]]:
    """Train with and without observation, and compare both. Returns the rows, and by rank whether
    the observation was still active at the end."""
    observed = run_ranks(ranks, train_observed, run, str(tmp_path))
    active = [rank.pop("active") for rank in observed]
    plain = run._replace(observed=False, breaks="")
    assert observed == run_ranks(ranks, train_observed, plain, str(tmp_path))
    return read_rows(tmp_path) if all(active) else [], active


def count_ops(rows: list[dict[str, Any]]) -> Counter[tuple[int, str, int, int]]:
    """Count rows by step, op type, global chunk and microbatch."""
    return Counter((row["step"], row["optype"], row["gmc"], row["mb_id"]) for row in rows)


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        ("1F1B", 2),
        ("ZBVZeroBubble", 2),
        *(pytest.param(each, 4, marks=pytest.mark.full) for each in SCHEDULES),
    ],
)
def test_training_is_equal_to_the_bit_and_every_op_is_recorded(
    tmp_path: Path, schedule: str, ranks: int
) -> None:
    rows, active = train_twice(tmp_path, ObservedRun(schedule), ranks)
    assert all(active)
    stages = ranks * SCHEDULES[schedule][1]
    # The first step has set-up. Microbatches have numbers, data and optimizers have none.
    assert {row["step"] for row in rows} == {1, 2, 3}
    ops = count_ops([row for row in rows if row["mb_id"] >= 0])
    assert set(ops.values()) == {1}
    every = {(s, m) for s in (1, 2, 3) for m in range(4)}

    def list_chunks(optype: str) -> list[int]:
        found: dict[int, set[tuple[int, int]]] = {}
        for step, kind, chunk, microbatch in ops:
            if kind == optype:
                found.setdefault(chunk, set()).add((step, microbatch))
        assert all(each == every for each in found.values()), optype
        return sorted(found)

    whole = list(range(stages))
    assert list_chunks("forward-compute") == whole
    assert list_chunks("backward-compute") == whole
    assert list_chunks("loss") == [stages - 1]
    # Two stages of a V are on one rank, and exchange no messages.
    apart = [s for s in whole[1:] if schedule != "ZBVZeroBubble" or s != stages // 2]
    assert list_chunks("forward-recv") == apart
    assert list_chunks("forward-send") == [s - 1 for s in apart]
    assert list_chunks("backward-recv") == [s - 1 for s in apart]
    assert list_chunks("backward-send") == apart
    # Stage 0 has no gradient of its input: its whole backward is one op.
    weights = list_chunks("backward-weight") if "ZeroBubble" in schedule else []
    assert 0 not in weights
    kind = f"torch {SCHEDULES[schedule][0].__name__}"
    assert [row["schedule"] for row in rows if "schedule" in row] == [kind] * 3 * ranks
    for row in rows:
        assert row["duration"] >= 0
        is_message = row["optype"].endswith(("-send", "-recv"))
        assert row.get("bytes") == (4 * 4 * WIDTH if is_message else None)
        if "recv" in row["optype"]:
            assert row["start_ts"] == row["posted"] <= row["waited"]
    for optype in ("optimizer", "data"):
        assert Counter(op[0] for op in count_ops(rows).elements() if op[1] == optype) == {
            1: ranks, 2: ranks, 3: ranks,
        }, optype  # fmt: skip


@pytest.mark.parametrize("own_optimizer", [False, pytest.param(True, marks=pytest.mark.full)])
def test_accumulation_is_one_step_and_evaluation_is_none(
    tmp_path: Path, own_optimizer: bool
) -> None:
    run = ObservedRun(accumulate=2, evaluate=True, steps=3, own_optimizer=own_optimizer)
    rows, active = train_twice(tmp_path, run)
    assert all(active)
    ops = count_ops([row for row in rows if row["optype"] == "forward-compute"])
    assert sorted(ops.elements()) == [
        (step, "forward-compute", stage, microbatch)
        for step in (1, 2)
        for stage in range(2)
        for microbatch in range(8)
    ]


def test_replicas_are_numbered_by_their_pipelines(tmp_path: Path) -> None:
    run = ObservedRun(replicas=2, microbatches=2, steps=2)
    run_ranks(4, train_observed, run, str(tmp_path))
    places = {(row["rank"], row["stage"], row["dp_rank"]) for row in read_rows(tmp_path)}
    assert places == {(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)}


@pytest.mark.parametrize(
    "schedule", ["1F1B", pytest.param("Interleaved1F1B", marks=pytest.mark.full)]
)
def test_reductions_of_ddp_are_apart_from_the_last_backward(tmp_path: Path, schedule: str) -> None:
    run = ObservedRun(schedule, replicas=2, microbatches=2, steps=3, data_parallel=True)
    rows, active = train_twice(tmp_path, run, ranks=4)
    assert all(active)
    reductions: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for row in rows:
        if row["optype"] == "grads-reduce-scatter":
            start = row["start_ts"]
            members = reductions.setdefault((row["step"], row["gmc"]), [])
            members.append((start, start + row["duration"]))
            assert row["mb_id"] == -1
    stages = 2 * SCHEDULES[schedule][1]
    assert sorted(reductions) == [(step, stage) for step in (1, 2) for stage in range(stages)]
    for members in reductions.values():
        assert len(members) == 2
        # A reduction ends when all its members have begun theirs.
        assert max(start for start, _ in members) < min(end for _, end in members)
    backwards = [row for row in rows if row["optype"] == "backward-compute"]
    ends = {(row["rank"], row["start_ts"]) for row in rows if "reduce" in row["optype"]}
    last = [row for row in backwards if (row["rank"], row["start_ts"] + row["duration"]) in ends]
    assert len(last) == 2 * 2 * stages
    assert {row["mb_id"] for row in last} == {1}


@pytest.mark.parametrize(
    "breaks",
    ["raises", *(pytest.param(each, marks=pytest.mark.full) for each in ("disk", "folder"))],
)
def test_failing_observation_ends_and_training_goes_on(tmp_path: Path, breaks: str) -> None:
    rows, active = train_twice(tmp_path, ObservedRun(breaks=breaks, steps=3))
    assert not rows
    # A full disk ends the recorder; its warning was logged, and nothing is left to end.
    assert active == [breaks == "disk"] * 2


@pytest.mark.full
def test_missing_hooks_of_messages_cost_only_messages(tmp_path: Path) -> None:
    rows, active = train_twice(tmp_path, ObservedRun(breaks="renamed", steps=3))
    assert all(active)
    assert {row["optype"] for row in rows} - {"gc"} == {
        "forward-compute", "backward-compute", "loss", "data", "optimizer",
    }  # fmt: skip


@pytest.mark.parametrize("way", [pytest.param("module", marks=pytest.mark.full), "site"])
def test_scripts_are_observed_unchanged(tmp_path: Path, way: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    support = str(PROGRAM.parent)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [str(PROGRAM), str(tmp_path), "--flag"]
    if way == "module":
        command = ["-m", "pipemorph_trainer.observe", "--out", str(tmp_path / "ops"), *command]
        environ["PYTHONPATH"] = support
    else:
        site = subprocess.run(
            [sys.executable, "-m", "pipemorph_trainer.observe", "--site"],
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout.strip()  # fmt: skip
        (tmp_path / "next").mkdir()
        (tmp_path / "next" / "sitecustomize.py").write_text(
            "import os\nos.environ['NEXT_SITE'] = 'ran'\n"
        )
        environ["PYTHONPATH"] = os.pathsep.join((site, support, str(tmp_path / "next")))
        environ["PIPEMORPH_OBSERVE"] = str(tmp_path / "ops")
    subprocess.run(
        [*launcher, *command], env=environ, cwd=tmp_path, check=True, timeout=100,
        capture_output=True,
    )  # fmt: skip
    assert (tmp_path / "result0.json").read_text().startswith('["--flag"')
    assert {row["step"] for row in read_rows(tmp_path / "ops")} == {1, 2}


@pytest.mark.parametrize(
    ("arguments", "message"), [([], "SCRIPT is missing"), (["none.py"], "none.py: no such file")]
)
def test_missing_scripts_are_refused(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "pipemorph_trainer.observe", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert message in result.stderr
