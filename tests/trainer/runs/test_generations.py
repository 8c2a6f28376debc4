"""``pipemorph run`` goes on after a rank has died, without beginning again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import prepared_processes
import pytest
from local_runs import TIMES, Done, command, manifest, rank_of, read_until, run

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

SCRIPT = """
import json, os, signal
import torch
from torch import nn
from pipemorph_trainer import EmulatedStage, Pipeline, TrainerContext

generation = int(os.environ["PIPEMORPH_GENERATION"])
if json.loads(os.environ["PIPEMORPH_ARGS"]).get("deaf") and generation == 0:
    os.environ["PIPEMORPH_INGEST_URL"] = "http://127.0.0.1:9"
context = TrainerContext.from_env()
args = context.args

def disturb(iteration):
    if iteration == args.get("at") and context.rank == 1:
        if args["how"] == "raise":
            raise ValueError("sample 7 has no labels")
        if generation == 0 and args["how"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(context.coordinate().stage)
common = {"context": context}
if context.job.spec.emulation is None:
    stage = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    optimizer = torch.optim.Adam(stage.parameters(), 1e-2)
    common |= {"optimizer": optimizer, "loss_fn": nn.functional.mse_loss}
else:
    stage = EmulatedStage.from_spec(context.job.spec, stage=context.coordinate().stage)
with Pipeline(stage, **common) as pipe:
    while pipe.iteration < context.job.spec.trainer.iterations:
        disturb(pipe.iteration)
        if context.job.spec.emulation is None:
            draw = torch.Generator().manual_seed(pipe.iteration)
            batch = torch.randn(4, 8, generator=draw)
            optimizer.zero_grad()
            pipe.step(batch, target=batch.flip(1))
            optimizer.step()
        else:
            pipe.step()
"""


def job(folder: Path, args: dict[str, Any], iterations: int = 8, **spec: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(SCRIPT)
    made = manifest(
        **{
            "parallelism": {"stages": 2},
            "schedule": {"microbatches": 4},
            "trainer": {
                "command": ["python", str(folder / "train.py")],
                "iterations": iterations,
                "args": args,
            },
            "checkpoint": {"directory": str(folder / "checkpoints"), "every": 1},
            "failurePolicy": {"maxRestarts": 2},
            "emulation": None,
        }
        | spec
    )
    return made


def test_unreported_iterations_of_ranks_count(tmp_path: Path) -> None:
    """Ranks end right after their first iteration, and their reports are lost."""
    made = job(tmp_path / "a", {"at": 1, "how": "kill", "deaf": True}, checkpoint=None)
    made["spec"]["failurePolicy"]["maxRestarts"] = 1
    done = run(tmp_path / "a", made)
    report = done.report
    assert len(report["attempts"]) == 1, f"an attempt clears the copies\n{done}"
    (recovery,) = report["recoveries"]
    assert recovery["rung"] == "generation" and recovery["iterations_done"] == 0, done
    assert "the ranks start again as generation 1 after 0 iterations" in done.output
    assert done.status == 0, done


def test_a_rank_that_stands_still_is_found(tmp_path: Path) -> None:
    made = job(
        tmp_path / "a",
        {},
        iterations=60,
        emulation={"stageTimes": [TIMES], "messageBytes": 16384},
        failurePolicy={"maxRestarts": 1, "hangSeconds": 5},
    )
    host = prepared_processes.PreparedProcess(
        command(tmp_path / "a", made), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said = read_until(host, 5)
    os.kill(rank_of(host.pid, 1), signal.SIGSTOP)
    rest, _ = host.communicate(timeout=200)
    done = Done(host.returncode, said + rest, tmp_path / "a" / "out")
    assert done.status == 0, done
    (recovery,) = done.report["recoveries"]
    assert re.match(r"no iteration was finished for \d+ s \(spec.failureP", recovery["cause"]), done
    assert recovery["rank"] == 1 and recovery["rung"] == "generation"
    assert "rank 1 (stage 1) is stopped, as by SIGSTOP" in done.output
    assert "killed, since" not in done.output, "it ends by itself on request"
    for rank in range(2):
        assert "most recent call first" in (done.out / "logs" / f"rank-{rank}.log").read_text()


def test_an_error_that_comes_again_is_the_users(tmp_path: Path) -> None:
    args = {"at": 5, "how": "raise"}
    done = run(tmp_path / "a", job(tmp_path / "a", args, failurePolicy={"maxRestarts": 1000}))
    assert done.status == 1
    assert re.search(r"not started again: iteration \d failed twice, with the same er", done.output)
    assert "ValueError: sample 7 has no labels" in done.output
    assert "rank 1 (stage 1) exited with code 1" in done.report["reason"]
    assert len(done.report["attempts"]) == 1 and len(done.report["recoveries"]) <= 2


def test_the_plan_in_force_outlives_the_ranks(tmp_path: Path) -> None:
    """A link is slow from iteration 6 on: the next ranks need not find out again."""
    made = job(
        tmp_path / "a",
        {"at": 24, "how": "kill"},
        iterations=36,
        parallelism={"stages": 4},
        schedule={"microbatches": 12, "policy": "pipemorph"},
        emulation={"stageTimes": [TIMES], "messageBytes": 16384, "standsForBytes": 1 << 24},
        faults=[{"link": 2, "fromIteration": 6, "toIteration": 1000, "delayMs": 60.0}],
    )
    done = run(tmp_path / "a", made)
    assert done.status == 0, done
    report = done.report
    (recovery,) = report["recoveries"]
    adapted = [each["plan_version"] for each in report["adaptations"]]
    assert adapted, done
    versions = {each["index"]: each["plan_version"] for each in report["iterations"]}
    went_on = recovery["went_on_with"]
    in_force = versions[went_on - 1]
    assert in_force in adapted, done
    # The first iterations have the plan of the spec, until all have prepared the one in force.
    assert in_force in [versions[went_on + number] for number in range(4)], done
