"""Layers move between stages under ``pipemorph run``: the old parts or the new ones, never a
mixture."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from local_runs import losses, manifest, report_of, run_moves

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

LAYERS, TOTAL, ITERATIONS = [4, 2], 6, 28

SCRIPT = """
import json, os, shutil, signal, time
from dataclasses import replace
from pathlib import Path
import torch
from torch import nn
from pipemorph.exits import leave_file
from pipemorph_trainer import Pipeline, TrainerContext
from pipemorph_trainer.state.kept import composed, resuming
from pipemorph_trainer.state.kept.copies import Copy
from pipemorph_trainer.state.kept.keeper import Keeper
from pipemorph_trainer.state.kept.slots import Slots

context = TrainerContext.from_env()
asks_in = context.kept_dir
if context.args["how"] in ("pods", "borrowing") and context.rank > 1:
    # The second stage is in another pod, whose host asks nobody to leave.
    own = context.kept_dir / "pod"
    own.mkdir(exist_ok=True)
    context = replace(context, kept_dir=own)
how, generation, here = context.args["how"], context.generation, Path(__file__).parent
place = context.coordinate()

def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

victim = context.rank == 1
if victim and generation == 0 and how == "copying":
    Keeper.seal = killed
if victim and generation == 1 and how == "borrowing":
    resuming.receive = killed
if victim and generation == 1 and how == "composing":
    resuming.compose = killed
if victim and generation == 1 and how == "keeping the new part":
    Keeper._keep_new_part = killed
if victim and generation == 1 and how == "kept the new part":
    def half(self, old, *rest, _keep=Keeper._keep_new_part):
        # Killed with both copies, before all have met.
        self._world.tell_all = killed
        _keep(self, old, *rest)
    Keeper._keep_new_part = half
if victim and generation == 1 and how == "no memory":
    def begin(self, *_, _begin=Slots.begin):
        Slots.begin = _begin
        raise OSError(28, "No space left on device")
    Slots.begin = begin
if victim and generation == 1 and how == "changed":
    for path in (context.kept_dir / "rank-1.generation-0").glob("[a-f]"):
        Copy.open(path).raw()[0] += 1
if victim and generation == 1 and how == "gone":
    shutil.rmtree(context.kept_dir / "rank-1.generation-0")

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return x + torch.tanh(self.norm(self.linear(x)))

class Stage(nn.Module):
    def __init__(self, part):
        super().__init__()
        if part.is_first:
            torch.manual_seed(100)
            self.embed = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleDict()
        numbers = part.layers(TOTAL) if how != "deaf" else range(3 * part.stage, 3 * part.stage + 3)
        for number in numbers:
            # The state of the beginning depends on no split.
            torch.manual_seed(number)
            self.layers[("x" if how == "clashing" else "") + str(number % (
                3 if how == "clashing" else 99))] = Layer()
        if part.is_last:
            self.head = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        if hasattr(self, "embed"):
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if hasattr(self, "head") else x

TOTAL = 6

def build(part):
    if generation == 1 and how == "refusing to build":
        raise context_error()
    stage = Stage(part)
    held = sorted(stage.layers)
    (here / f"held-{generation}-{context.rank}").write_text(json.dumps(held))
    return stage

def context_error():
    from pipemorph.errors import InputError
    return InputError("this builder takes no other split")

def optimizer(module):
    weights = [p for p in module.parameters() if p.ndim > 1]
    rest = [p for p in module.parameters() if p.ndim < 2]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": rest, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2)

whole = how == "module"
from pipemorph_trainer import Part
stage = Stage(Part(place.stage, 2)) if whole else build
made = optimizer(stage) if whole else optimizer
tied = [("embed.weight", 0), ("head.weight", 1)]
state = lambda made: {"schedule": torch.optim.lr_scheduler.ExponentialLR(made, 0.99)}
loss_fn = nn.functional.mse_loss
with Pipeline(
    stage, context=context, optimizer=made, loss_fn=loss_fn, tied=tied, state=state
) as pipe:
    first, waits = pipe.start_iteration, generation < context.args["moves"]
    schedule = pipe._parts.state["schedule"]
    while pipe.iteration < context.job.spec.trainer.iterations:
        if waits and pipe.iteration >= first + 6:
            # Slowly from now on, until the host asks: a busy machine may let it ask late.
            deadline = time.monotonic() + 10
            while waits and time.monotonic() < deadline:
                time.sleep(0.01)
                waits = not (asks_in / leave_file(generation)).exists()
        asked = victim and generation == 0 and (context.kept_dir / leave_file(0)).exists()
        if asked and how == "leaving":
            killed()
        if victim and generation == 1 and how == "at once" and pipe.iteration == first:
            killed()
        if victim and generation == 1 and how == "after" and pipe.iteration == first + 4:
            killed()
        draw = torch.Generator().manual_seed(100 * pipe.iteration + place.replica)
        batch = torch.randn(16, 8, generator=draw)
        pipe.step(batch, target=batch.flip(1))
        if victim and generation == 1 and how == "unable" and pipe.iteration == first + 1:
            raise context_error()
        pipe.optimizer.step()
        schedule.step()
        pipe.optimizer.zero_grad()
        pipe.clip_grad_norm_(1e9)
"""


def run(
    folder: Path, how: str, *, moves: Sequence[Sequence[int]] = (LAYERS,), **spec: Any
) -> dict[str, Any]:
    cut = {"stages": 2, "replicas": 2, "layers": TOTAL}
    spec = {"parallelism": cut, "iterations": ITERATIONS} | spec
    return run_moves(folder, SCRIPT, "layers", moves, {"how": how, "moves": len(moves)}, **spec)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return losses(run(tmp_path_factory.mktemp("runs") / "undisturbed", "", moves=()))


OLD, NEW = [3, 3], LAYERS


def soak(*values: Any) -> Any:
    """A case for `make soak`: each takes some twenty seconds."""
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("how", "generations", "outcome"),
    [
        soak("", [OLD, NEW], "moved"),
        soak("pods", [OLD, NEW], "moved"),
        soak("leaving", [OLD, OLD], "stayed"),
        soak("copying", [OLD, OLD], "stayed"),
        ("refusing to build", [OLD, None, OLD], "went back"),
        soak("borrowing", [OLD, NEW, OLD], "went back"),
        soak("composing", [OLD, NEW, OLD], "went back"),
        soak("keeping the new part", [OLD, NEW, OLD], "went back"),
        ("kept the new part", [OLD, NEW, OLD], "went back"),
        soak("no memory", [OLD, NEW, OLD], "went back"),
        soak("at once", [OLD, NEW, OLD], "went back"),
        soak("unable", [OLD, NEW, OLD], "went back"),
        soak("after", [OLD, NEW, NEW], "moved"),
    ],
)
def test_the_old_parts_or_the_new_ones(
    tmp_path: Path,
    undisturbed: dict[int, float],
    how: str,
    generations: list[list[int] | None],
    outcome: str,
) -> None:
    """With tied weights, two groups of parameters, Adam's state, statistics of layers and a
    schedule of the learning rate."""
    report = run(tmp_path / "run", how)
    for generation, split in enumerate(generations):
        found = list((tmp_path / "run").glob(f"held-{generation}-*"))
        assert bool(found) is (split is not None)
        for path in found:
            assert split is not None
            stage = int(path.name[-1]) // 2
            begin = sum(split[:stage])
            want = list(map(str, range(begin, begin + split[stage])))
            assert json.loads(path.read_text()) == want
    assert not (tmp_path / "run" / f"held-{len(generations)}-0").exists()
    (move,) = report["relayouts"]
    assert move["outcome"] == outcome, report["said"]
    assert (move["layers_before"], move["layers"], move["moved"]) == (OLD, NEW, [])
    if not how:
        assert move["seconds"] > 0
    assert report["completed"]
    told = losses(report)
    assert told.items() <= undisturbed.items()
    # Ranks that are killed may have finished iterations that they could not report.
    assert len(told) >= len(undisturbed) - 3


@pytest.mark.parametrize("how", [soak("changed"), "gone"])
def test_copies_that_are_not_those_that_were_left(
    tmp_path: Path, undisturbed: dict[int, float], how: str
) -> None:
    report = run(tmp_path, how)
    (move,) = report["relayouts"]
    assert move["outcome"] == "went back"
    assert "ranks do not have their copies in their new layout" in report["said"]
    assert ("is damaged" in report["said"]) is (how != "gone")
    state = report["recoveries"][-1]["state"]
    if how == "changed":
        assert state == "beginning"
        assert losses(report) == undisturbed
    else:
        # A replica has seen other data, of which its layers keep statistics.
        assert state == "replica"


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("module", "Pipeline was given a stage, and no function that builds it"),
        soak("deaf", "the function that builds a stage does not ask part.layers()"),
        soak("clashing", "stages 0 and 1 both have 'layers.x0.linear.bias'"),
    ],
)
def test_parts_that_cannot_change_say_so_once(
    tmp_path: Path, undisturbed: dict[int, float], how: str, why: str
) -> None:
    report = run(tmp_path, how)
    (move,) = report["relayouts"]
    assert move["outcome"] == "stayed"
    assert "the parts of the model cannot change: " in move["why"] and why in move["why"]
    assert report["said"].count(why) == 1
    assert not (tmp_path / "held-1-0").exists()
    if how != "clashing":
        assert losses(report) == undisturbed


def test_layers_move_there_and_back_and_a_checkpoint_between_resumes_on_any_split(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    """A run that begins from it begins with the even split."""
    saved = {"directory": str(tmp_path / "saved"), "every": 1, "keep": ITERATIONS}
    report = run(tmp_path / "first", "", moves=[LAYERS, OLD], checkpoint=saved)
    there, back = report["relayouts"]
    assert (there["outcome"], there["layers"]) == ("moved", LAYERS), report["said"]
    assert (back["outcome"], back["layers"]) == ("moved", OLD), report["said"]
    assert there["seconds"] > 0 and there["moved"] == []
    assert losses(report).items() <= undisturbed.items()
    for generation, split in enumerate([OLD, LAYERS, OLD]):
        held = [
            json.loads((tmp_path / "first" / f"held-{generation}-{rank}").read_text())
            for rank in (0, 2)
        ]
        numbers = list(map(str, range(TOTAL)))
        assert held == [numbers[: split[0]], numbers[split[0] :]]
    # Of the new parts, which were left later.
    newest = there["iteration"] + 2
    assert newest < back["iteration"]
    for folder in (tmp_path / "saved").iterdir():
        if int(folder.name.split("-")[1].split(".")[0]) > newest:
            shutil.rmtree(folder)
    assert (tmp_path / "saved" / f"iteration-{newest:08d}" / ".metadata").exists()
    again = run(tmp_path / "again", "", moves=(), checkpoint=saved)
    assert next(each["index"] for each in again["iterations"]) >= newest
    assert losses(again).items() <= undisturbed.items()


MESHES = [{"shard": 2}, soak({"tensor": 2}), soak({"replicas": 2, "shard": 2})]


@pytest.mark.parametrize("mesh", MESHES)
def test_layers_of_ranks_that_share_a_stage(tmp_path: Path, mesh: dict[str, int]) -> None:
    """Each takes its part of a layer from the rank of the other stage that had the same part."""
    job = {
        "parallelism": {"stages": 2, "layers": 4, **mesh},
        "trainer": {
            "module": "pipemorph_trainer.examples.gpt",
            "iterations": 40,
            "args": {"width": 16, "heads": 2, "sequence": 8, "microbatch_size": 1, "clip": 1e9},
        },
    }
    report = run(tmp_path / "moved", "", moves=[[3, 1]], **job)
    assert [move["outcome"] for move in report["relayouts"]] == ["moved"], report["said"]
    undisturbed = run(tmp_path / "undisturbed", "", moves=(), **job)
    assert losses(report) == losses(undisturbed)


def test_a_slow_device_gets_fewer_layers(tmp_path: Path) -> None:
    """The whole loop, with stages that are EMULATED. What it brings depends on how busy the machine
    is, and is not judged here."""
    job = manifest(
        parallelism={"stages": 4, "layers": 16},
        schedule={"microbatches": 6},
        emulation={
            "stageTimes": [dict.fromkeys(("forward", "backwardInput", "backwardWeight"), 16.0)],
            "messageBytes": 1024,
        },
        trainer={"module": "pipemorph_trainer.examples.emulated", "iterations": 80},
        failurePolicy={"maxRestarts": 1},
        adaptation={"relayout": True},
        faults=[{"device": 1, "slowdown": 2.0, "fromIteration": 12}],
    )  # fmt: skip
    report = report_of(tmp_path, job)
    told = "\n".join(line for line in report["said"].splitlines() if "s/it" not in line)
    assert len(report["relayouts"]) == 1, told
    (move,) = report["relayouts"]
    assert move["outcome"] == "moved", report["said"]
    assert move["reason"].startswith("stage 1 computes for ")
    assert move["iteration"] > 12
    assert (move["layers_before"][1], sum(move["layers"])) == (4, 16)
    assert move["layers"][1] in {2, 3}
    assert move["promised"] > 0.15
    slowed = [each for each in report["faults"] if each["device"] == 1]
    assert slowed and slowed[0]["ops_held"] > 0
