"""Ranks change places under ``pipemorph run``: the old layout or the new one, never a mixture."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from local_runs import losses, manifest, report_of, run_moves

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

PLACES = [3, 1, 2, 0]
ITERATIONS = 24

SCRIPT = """
import json, os, shutil, signal, time
from pathlib import Path
import torch
from torch import nn
from pipemorph.exits import leave_file
from pipemorph_trainer import Pipeline, TrainerContext
from pipemorph_trainer.state.kept.copies import Copy
from pipemorph_trainer.state.kept import resuming
from pipemorph_trainer.state.kept.keeper import Keeper

context = TrainerContext.from_env()
how, generation, here = context.args["how"], context.generation, Path(__file__).parent
seen = [os.environ["PIPEMORPH_PLACES"], os.environ["LOCAL_RANK"]]
(here / f"places-{generation}-{context.rank}").write_text(json.dumps(seen))

def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

victim = context.rank == 1
if victim and generation == 0 and how == "copying":
    Keeper.seal = killed
if victim and generation == 1 and how == "meeting":
    killed()
if victim and generation == 1 and how == "resuming":
    Keeper.resume = killed
if victim and generation == 1 and how == "changed":
    for path in (context.kept_dir / "rank-1.generation-0").glob("[a-f]"):
        Copy.open(path).raw()[0] += 1
if victim and generation == 1 and how == "misread":
    Copy.damaged = property(lambda copy: True)
if victim and generation == 1 and how == "gone":
    shutil.rmtree(context.kept_dir / "rank-1.generation-0")
if victim and how == "refusing":
    Keeper.seal = lambda *_, **__: "it has no memory left"

torch.manual_seed(context.coordinate().stage)
stage = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh())
optimizer = torch.optim.Adam(stage.parameters(), 1e-2)
loss_fn = nn.functional.mse_loss
waits = context.args["moves"] and generation == 0
with Pipeline(stage, context=context, optimizer=optimizer, loss_fn=loss_fn) as pipe:
    first = pipe.start_iteration
    while pipe.iteration < context.job.spec.trainer.iterations:
        if waits and pipe.iteration >= 6:
            # Slowly from now on, until the host asks: a busy machine may let it ask late.
            deadline = time.monotonic() + 10
            while waits and time.monotonic() < deadline:
                time.sleep(0.01)
                waits = not (context.kept_dir / leave_file(0)).exists()
        asked = victim and generation == 0 and (context.kept_dir / leave_file(0)).exists()
        if asked and how == "leaving":
            killed()
        if victim and generation == 1 and how == "after" and pipe.iteration == first + 2:
            killed()
        draw = torch.Generator().manual_seed(100 * pipe.iteration + context.coordinate().replica)
        batch = torch.randn(4, 8, generator=draw)
        optimizer.zero_grad()
        pipe.step(batch, target=batch.flip(1))
        optimizer.step()
        pipe.clip_grad_norm_(1e9)
"""


def run(folder: Path, how: str, *, moves: bool = True, **spec: Any) -> dict[str, Any]:
    # Places change although these stages, which are modules, keep their layers.
    cut = {"stages": 2, "replicas": 2, "layers": 4}
    spec = {"parallelism": cut, "iterations": ITERATIONS} | spec
    told = [json.dumps(PLACES)] if moves else []
    return run_moves(folder, SCRIPT, "places", told, {"how": how, "moves": moves}, **spec)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    return losses(run(folder, "", moves=False, adaptation={}))


@pytest.mark.parametrize(
    ("how", "generations", "outcome"),
    [
        ("", [None, PLACES], "moved"),
        ("leaving", [None, None], "stayed"),
        pytest.param("copying", [None, None], "stayed", marks=pytest.mark.soak),
        ("refusing", [None], "stayed"),
        ("meeting", [None, PLACES, None], "went back"),
        pytest.param("resuming", [None, PLACES, None], "went back", marks=pytest.mark.soak),
        ("after", [None, PLACES, PLACES], "moved"),
    ],
)
def test_the_old_layout_or_the_new_one(
    tmp_path: Path,
    undisturbed: dict[int, float],
    how: str,
    generations: list[list[int] | None],
    outcome: str,
) -> None:
    # An ordinary copy is due long after the ranks leave: those that they leave with are others.
    report = run(tmp_path / "run", how, **({} if how else {"recovery": {"snapshotIterations": 50}}))
    for generation, places in enumerate(generations):
        want = places or [0, 1, 2, 3]
        # A rank may have ended before it could tell.
        found = list((tmp_path / "run").glob(f"places-{generation}-*"))
        assert found
        for path in found:
            told = json.loads(path.read_text())
            assert json.loads(told[0]) == want
            assert int(told[1]) == want[int(path.name[-1])]
    assert not (tmp_path / "run" / f"places-{len(generations)}-0").exists()
    (move,) = report["relayouts"]
    assert move["outcome"] == outcome
    assert (how != "refusing") or "no memory left" in move["why"]
    if outcome == "moved":
        assert (move["places"], move["moved"]) == (PLACES, [0, 3])
    if not how:
        assert move["seconds"] > 0
        log = (tmp_path / "run" / "out" / "logs" / "rank-0.log").read_text()
        left = re.search(r"left at iteration (\d+), for other places", log)
        assert left is not None and move["iteration"] == int(left[1])
    assert losses(report) == undisturbed
    assert report["completed"]


@pytest.mark.parametrize(
    "how", ["changed", "misread", pytest.param("gone", marks=pytest.mark.soak)]
)
def test_copies_that_are_not_those_that_were_left(
    tmp_path: Path, undisturbed: dict[int, float], how: str
) -> None:
    """The new places do not begin with them. Those before do, if they are right after all, and
    else what recovers from every loss of memory does."""
    report = run(tmp_path, how)
    (move,) = report["relayouts"]
    assert move["outcome"] == "went back"
    assert not (tmp_path / "places-3-0").exists()
    told = json.loads((tmp_path / "places-2-0").read_text())
    assert json.loads(told[0]) == [0, 1, 2, 3]
    second = report["recoveries"][-1]
    assert "ranks do not have their copies in their new layout" in report["said"]
    assert ("a copy of rank 1 is damaged" in report["said"]) is (how != "gone")
    if how == "misread":
        assert second["state"] == "kept", second
        assert losses(report) == undisturbed
    if how == "changed":
        # With random state of its own: there is dropout.
        assert second["state"] == "replica", second


@pytest.mark.times
def test_a_late_wire_between_two_pods_goes_between_two_stages(tmp_path: Path) -> None:
    """The whole loop, with ranks that are EMULATED: the reductions become slow, the ring's edges
    are measured, ranks change places, and the plan for the late link follows."""
    job = manifest(
        parallelism={
            "stages": 2, "replicas": 2, "ranksPerPod": 2, "order": ["dp_replicate", "pp"],
        },
        schedule={"microbatches": 8},
        emulation={
            "stageTimes": [dict.fromkeys(("forward", "backwardInput", "backwardWeight"), 10.0)],
            "messageBytes": 1024,
            "gradientBytes": 1 << 20,
        },
        # So late a wire and so many iterations that a busy machine hides neither: what messages of
        # the ring usually take is measured when the ranks have just begun, while others still
        # start, and a change has to save more than the longest start took.
        trainer={"module": "pipemorph_trainer.examples.emulated", "iterations": 160},
        failurePolicy={"maxRestarts": 1},
        adaptation={"relayout": True},
        faults=[{"between": [0, 1], "delayMs": 60, "fromIteration": 15}],
    )  # fmt: skip
    report = report_of(tmp_path, job)
    told = "\n".join(line for line in report["said"].splitlines() if "s/it" not in line)
    assert len(report["relayouts"]) == 1, told
    (move,) = report["relayouts"]
    assert move["outcome"] == "moved", report["said"]
    assert "pods 0 and 1" in move["reason"]
    # Each pod has both replicas of one stage now.
    places = move["places"]
    assert {places[0] // 2, places[2] // 2} in ({0}, {1})
    assert {places[1] // 2, places[3] // 2} in ({0}, {1})
    assert move["promised"] > 0.3
    slow = [each for each in report["adaptations"] if "link 0" in each["reason"]]
    assert slow and slow[0]["detected_at_iteration"] > move["iteration"] - 2
    seconds = [each["seconds"] for each in report["iterations"]]
    assert median(seconds[-15:]) < 0.75 * median(seconds[16 : move["iteration"] - 1])
