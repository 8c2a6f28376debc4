"""Layers move between stages, and ranks change places, under ``pipemorph run``: the old layout or
the new one, never a mixture."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from local_runs import losses, manifest, report_of, run_moves

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

TOTAL, ITERATIONS = 6, 28
OLD, NEW = [3, 3], [4, 2]
"""Layers, by stage."""
AT, TO = [0, 1, 2, 3], [3, 1, 2, 0]
"""Places, by rank."""

SCRIPT = """
import json, os, shutil, signal, time
from dataclasses import replace
from pathlib import Path
import torch
from torch import nn
from pipemorph.exits import drain_request_file_name
from pipemorph_trainer import Pipeline, TrainerContext
from pipemorph_trainer.checkpoint.memory import resume_agreement
from pipemorph_trainer.checkpoint.memory.state_copy import StateCopy
from pipemorph_trainer.checkpoint.memory.checkpointer import InMemoryCheckpointer
from pipemorph_trainer.checkpoint.memory.copy_slots import CopySlots

context = TrainerContext.from_env()
asks_in = context.memory_dir
if context.args["how"] in ("pods", "borrowing", "lending", "sending") and context.rank > 1:
    # The second stage is in another pod, whose host requests no rank to depart.
    own = context.memory_dir / "pod"
    own.mkdir(exist_ok=True)
    context = replace(context, memory_dir=own)
how, generation, here = context.args["how"], context.generation, Path(__file__).parent
place, moves_layers = context.coordinate(), context.args["what"] == "layers"
seen = [json.loads(os.environ["PIPEMORPH_PLACES"]), int(os.environ["LOCAL_RANK"])]
(here / f"places-{generation}-{context.rank}").write_text(json.dumps(seen))

def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

victim = context.rank == 1
if victim and generation == 0 and how == "copying":
    InMemoryCheckpointer.seal_for_layout = killed
if victim and how == "refusing":
    def refuse(*_, **__):
        (here / "refused").touch()
        return "it has no more memory"
    InMemoryCheckpointer.seal_for_layout = refuse
if victim and generation == 1 and how == "meeting":
    killed()
if victim and generation == 1 and how == "resuming":
    InMemoryCheckpointer.resume = killed
if victim and generation == 1 and how == "borrowing":
    resume_agreement.receive_copy = killed
if context.rank == 3 and generation == 1 and how == "lending":
    resume_agreement.copy_lent_layers = killed
if context.rank == 2 and generation == 1 and how == "sending":
    resume_agreement.send_copy = killed
if victim and generation == 1 and how == "composing":
    resume_agreement.compose_state = killed
if victim and generation == 1 and how == "keeping the new part":
    InMemoryCheckpointer._copy_new_shard = killed
if victim and generation == 1 and how == "held the new part":
    def half(self, old, *rest, _keep=InMemoryCheckpointer._copy_new_shard):
        # Killed with both copies, before all have met.
        self._world.gather_all = killed
        _keep(self, old, *rest)
    InMemoryCheckpointer._copy_new_shard = half
if victim and generation == 1 and how == "no memory":
    def begin(self, *_, _begin=CopySlots.begin_slot):
        CopySlots.begin_slot = _begin
        raise OSError(28, "No space left on device")
    CopySlots.begin_slot = begin
if victim and generation == 1 and how == "changed":
    for path in (context.memory_dir / "rank-1.generation-0").glob("[a-f]"):
        StateCopy.open(path).view_tensor_bytes()[0] += 1
if victim and generation == 1 and how == "misread":
    StateCopy.damaged = property(lambda copy: True)
if victim and generation == 1 and how == "gone":
    shutil.rmtree(context.memory_dir / "rank-1.generation-0")

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        # Random numbers are a rank's own: they move with its place, and not with a layer.
        hidden = nn.functional.dropout(self.linear(x), 0.0 if moves_layers else 0.1)
        return x + torch.tanh(self.norm(hidden))

class Stage(nn.Module):
    def __init__(self, part):
        super().__init__()
        if part.is_first:
            torch.manual_seed(100)
            self.embed = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleDict()
        numbers = part.layers(TOTAL) if how != "deaf" else range(3 * part.stage, 3 * part.stage + 3)
        (here / f"layers-{generation}-{context.rank}").write_text(json.dumps(list(numbers)))
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
    return Stage(part)

def context_error():
    from pipemorph.errors import InputError
    return InputError("this builder takes no other split")

def optimizer(module):
    weights = [p for p in module.parameters() if p.ndim > 1]
    rest = [p for p in module.parameters() if p.ndim < 2]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": rest, "lr": 3e-3}]
    return torch.optim.AdamW(groups, lr=1e-2)

whole = how == "module" or not moves_layers
from pipemorph_trainer import ModelShard
stage = Stage(ModelShard(place.stage, 2)) if whole else build
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
                # What asks ranks to leave is gone again once one has refused.
                asks = (asks_in / drain_request_file_name(generation), here / "refused")
                waits = not any(each.exists() for each in asks)
        request = context.memory_dir / drain_request_file_name(0)
        requested = victim and generation == 0 and request.exists()
        if requested and how == "leaving":
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
    folder: Path,
    how: str,
    *,
    what: str = "layers",
    moves: Sequence[Sequence[int]] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """``moves``: by default one to the new layout; where a rank fails, ``how`` says."""
    cut = {"stages": 2, "replicas": 2, "layers": TOTAL}
    spec = {"parallelism": cut, "iterations": ITERATIONS} | spec
    moves = [NEW if what == "layers" else TO] if moves is None else moves
    texts = [json.dumps(each) for each in moves] if what == "places" else moves
    args = {"how": how, "what": what, "moves": len(moves)}
    return run_moves(folder, SCRIPT, what, texts, args, **spec)


Undisturbed = Callable[[str], dict[int, float]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Losses of a job whose layout stays, by what moves in the others."""

    @cache
    def losses_of(what: str) -> dict[int, float]:
        folder = tmp_path_factory.mktemp("runs") / what
        return losses(run(folder, "", what=what, moves=(), adaptation={}))

    return losses_of


def soak(*values: Any) -> Any:
    """A case for `make soak`: each takes some twenty seconds."""
    return pytest.param(*values, marks=pytest.mark.soak)


def began(folder: Path, what: str, generation: int, layout: list[int]) -> bool:
    """True if ranks of a generation have begun, and with this layout. A rank may have ended before
    it could report."""
    found = list(folder.glob(f"{what}-{generation}-*"))
    for path in found:
        rank = int(path.name[-1])
        first = sum(layout[: rank // 2])
        layers = [*range(first, first + layout[rank // 2])]
        assert json.loads(path.read_text()) == (
            layers if what == "layers" else [layout, layout[rank]]
        )
    return bool(found)


@pytest.mark.parametrize(
    ("what", "how", "generations"),
    [
        soak("layers", "", [OLD, NEW]),
        soak("layers", "pods", [OLD, NEW]),
        soak("layers", "leaving", [OLD, OLD]),
        soak("layers", "copying", [OLD, OLD]),
        ("layers", "refusing to build", [OLD, None, OLD]),
        soak("layers", "borrowing", [OLD, NEW, OLD]),
        soak("layers", "lending", [OLD, NEW, OLD]),
        soak("layers", "composing", [OLD, NEW, OLD]),
        soak("layers", "keeping the new part", [OLD, NEW, OLD]),
        ("layers", "held the new part", [OLD, NEW, OLD]),
        soak("layers", "no memory", [OLD, NEW, OLD]),
        soak("layers", "at once", [OLD, NEW, OLD]),
        soak("layers", "unable", [OLD, NEW, OLD]),
        soak("layers", "after", [OLD, NEW, NEW]),
        ("places", "", [AT, TO]),
        ("places", "leaving", [AT, AT]),
        soak("places", "copying", [AT, AT]),
        ("places", "refusing", [AT]),
        ("places", "meeting", [AT, TO, AT]),
        soak("places", "resuming", [AT, TO, AT]),
        soak("places", "sending", [AT, TO, AT]),
        ("places", "after", [AT, TO, TO]),
    ],
)
def test_the_old_layout_or_the_new_one(
    tmp_path: Path,
    undisturbed: Undisturbed,
    what: str,
    how: str,
    generations: list[list[int] | None],
) -> None:
    """The model has tied weights, two groups of parameters, Adam's state, statistics of layers and
    a schedule of the learning rate."""
    # An ordinary copy is due long after the ranks leave: those that they leave with are others.
    rare = {} if how else {"recovery": {"snapshotIterations": 50}}
    report = run(tmp_path / "run", how, what=what, **rare)
    for generation, layout in enumerate(generations):
        assert began(tmp_path / "run", what, generation, layout or OLD) is (layout is not None)
    assert not (tmp_path / "run" / f"{what}-{len(generations)}-0").exists()
    (move,) = report["relayouts"]
    moved = generations[-1] in (NEW, TO)
    outcome = "moved" if moved else "went back" if len(generations) > 2 else "stayed"
    assert move["outcome"] == outcome, report["said"]
    assert (how != "refusing") or "no more memory" in move["why"]
    if what == "layers":
        assert (move["layers_before"], move["layers"], move["moved"]) == (OLD, NEW, [])
    elif moved:
        assert (move["places"], move["moved"]) == (TO, [0, 3])
    if not how:
        assert move["seconds"] > 0
        log = (tmp_path / "run" / "out" / "logs" / "rank-0.log").read_text()
        stopped = re.search(rf"stopped before iteration (\d+), (for|with) other {what}", log)
        assert stopped is not None and move["iteration"] == int(stopped[1])
    assert report["completed"]
    reported = losses(report)
    assert reported.items() <= undisturbed(what).items()
    # Ranks that are killed may have finished iterations that they could not report.
    assert len(reported) >= ITERATIONS - (3 if what == "layers" else 0)


@pytest.mark.parametrize(
    ("what", "how", "state"),
    [
        # A replica has seen other data, and its layers have statistics of them.
        soak("layers", "changed", "replica"),
        ("layers", "gone", "replica"),
        # A replica has random numbers of its own: there is dropout.
        ("places", "changed", "replica"),
        ("places", "misread", "kept"),
        soak("places", "gone", "replica"),
    ],
)
def test_copies_that_are_not_those_of_the_departed_ranks(
    tmp_path: Path, undisturbed: Undisturbed, what: str, how: str, state: str
) -> None:
    """The new layout does not begin with them. The one before does, if they are right after all,
    and otherwise with the copies that survive every loss of memory."""
    report = run(tmp_path, how, what=what)
    (move,) = report["relayouts"]
    assert move["outcome"] == "went back"
    assert began(tmp_path, what, 2, OLD if what == "layers" else AT)
    assert not (tmp_path / f"{what}-3-0").exists()
    assert "ranks do not have their copies in their new layout" in report["said"]
    assert ("a copy of rank 1 is damaged" in report["said"]) is (how != "gone")
    assert report["recoveries"][-1]["state"] == state, report["recoveries"]
    if state != "replica":
        assert losses(report) == undisturbed(what)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("module", "Pipeline was given a stage, and no function that builds it"),
        soak("deaf", "the function that builds a stage does not call part.layers()"),
        soak("clashing", "stages 0 and 1 both have 'layers.x0.linear.bias'"),
    ],
)
def test_parts_that_cannot_change_say_so_once(
    tmp_path: Path, undisturbed: Undisturbed, how: str, why: str
) -> None:
    report = run(tmp_path, how)
    (move,) = report["relayouts"]
    assert move["outcome"] == "stayed"
    assert "the parts of the model cannot change: " in move["why"] and why in move["why"]
    assert report["said"].count(why) == 1
    assert not (tmp_path / "layers-1-0").exists()
    if how != "clashing":
        assert losses(report) == undisturbed("layers")


def test_layers_move_there_and_back_and_a_checkpoint_between_resumes_on_any_split(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """A run that begins from it begins with the even split."""
    saved = {"directory": str(tmp_path / "saved"), "every": 1, "keep": ITERATIONS}
    report = run(tmp_path / "first", "", moves=[NEW, OLD], checkpoint=saved)
    there, back = report["relayouts"]
    assert (there["outcome"], there["layers"]) == ("moved", NEW), report["said"]
    assert (back["outcome"], back["layers"]) == ("moved", OLD), report["said"]
    assert there["seconds"] > 0 and there["moved"] == []
    assert losses(report).items() <= undisturbed("layers").items()
    for generation, split in enumerate([OLD, NEW, OLD]):
        assert began(tmp_path / "first", "layers", generation, split)
    # Copies of the new parts, which were stored later.
    newest = there["iteration"] + 2
    assert newest < back["iteration"]
    for folder in (tmp_path / "saved").iterdir():
        if int(folder.name.split("-")[1].split(".")[0]) > newest:
            shutil.rmtree(folder)
    assert (tmp_path / "saved" / f"iteration-{newest:08d}" / ".metadata").exists()
    again = run(tmp_path / "again", "", moves=(), checkpoint=saved)
    assert next(each["index"] for each in again["iterations"]) >= newest
    assert losses(again).items() <= undisturbed("layers").items()


MESHES = [{"shard": 2}, soak({"tensor": 2}), soak({"replicas": 2, "shard": 2})]


@pytest.mark.parametrize("mesh", MESHES)
def test_layers_of_ranks_that_share_a_stage(tmp_path: Path, mesh: dict[str, int]) -> None:
    """Ranks take their part of a layer from the rank of the other stage that had the same part."""
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
    """The whole loop, with stages that are EMULATED. Its gain depends on how busy the machine is,
    and is not judged here."""
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
    output = "\n".join(line for line in report["said"].splitlines() if "s/it" not in line)
    assert len(report["relayouts"]) == 1, output
    (move,) = report["relayouts"]
    assert move["outcome"] == "moved", report["said"]
    assert move["reason"].startswith("stage 1 computes for ")
    assert move["iteration"] > 12
    assert (move["layers_before"][1], sum(move["layers"])) == (4, 16)
    assert move["layers"][1] in {2, 3}
    assert move["promised"] > 0.15
    slowed = [each for each in report["faults"] if each["device"] == 1]
    assert slowed and slowed[0]["ops_held"] > 0


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
    output = "\n".join(line for line in report["said"].splitlines() if "s/it" not in line)
    assert len(report["relayouts"]) == 1, output
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
