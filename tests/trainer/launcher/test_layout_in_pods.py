"""Layout changes in pods: layers move, ranks exchange places. Real launchers, ranks and ingest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pods import DEADLINE, Job

from pipemorph.exits import TRIAL_ITERATIONS

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]

ITERATIONS, TOTAL = 60, 6
OLD, NEW = [3, 3], [4, 2]

SCRIPT = """
import json, os, signal, time
from pathlib import Path
import torch
from torch import nn
from pipemorph_trainer import Pipeline, TrainerContext

context = TrainerContext.from_env()
here, generation, rank = Path(__file__).parent, context.generation, context.rank

class Stage(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.layers = nn.ModuleDict()
        for number in part.layers(context.args["layers"]):
            # The state of the beginning depends on no split.
            torch.manual_seed(number)
            self.layers[str(number)] = nn.Linear(8, 8)

    def forward(self, x):
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x))
        return x

def build(part):
    stage = Stage(part)
    (here / f"pod-{generation}-{rank}").write_text(os.environ["PIPEMORPH_POD_INDEX"])
    held = here / f"held-{generation}-{rank}"
    held.with_suffix(".new").write_text(json.dumps([int(number) for number in stage.layers]))
    held.with_suffix(".new").rename(held)
    return stage

def now(what, done):
    # Whether that is to happen after so many iterations of this generation.
    try:
        return done == int((here / f"{what}-{generation}").read_text())
    except FileNotFoundError:
        return False

optimizer = lambda stage: torch.optim.Adam(stage.parameters(), 1e-2)
loss_fn = nn.functional.mse_loss
with Pipeline(build, context=context, optimizer=optimizer, loss_fn=loss_fn) as pipe:
    while pipe.iteration < context.job.spec.trainer.iterations:
        done = pipe.iteration - pipe.start_iteration
        if now("kill", done) and rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        while now("hold", done):
            (here / f"holds-{generation}-{rank}").touch()
            time.sleep(0.01)
        if not (here / "hurry").exists():
            # Slower and slower, so that iterations remain however long a pod takes.
            time.sleep(0.1 if pipe.iteration < 20 else 1.0)
        draw = torch.Generator().manual_seed(100 * pipe.iteration + context.coordinate().replica)
        batch = torch.randn(16, 8, generator=draw)
        pipe.optimizer.zero_grad()
        pipe.step(batch, target=batch.flip(1))
        pipe.optimizer.step()
"""


class LayersJob(Job):
    """Job of two pods with a stage each, of two replicas."""

    def __init__(self, folder: Path) -> None:
        cut = {"stages": 2, "replicas": 2, "ranksPerPod": 2, "layers": TOTAL}
        spec = {
            "parallelism": {**cut, "order": ["pp", "dp_replicate"]},
            "recovery": {"neighbour": True},
            "adaptation": {"relayout": True},
        }
        super().__init__(
            folder, iterations=ITERATIONS, restarts=5, spec=spec, script=SCRIPT, layers=TOTAL
        )

    def at(self, what: str, generation: int, done: int) -> Path:
        """``hold`` the ranks, or ``kill`` rank 3, in a generation to come when ``done`` iterations
        of it are finished. Ranks are held until this file is removed."""
        file = self.folder / f"{what}-{generation}"
        file.write_text(str(done))
        return file

    def has(self, generation: int, layers: Sequence[int]) -> bool:
        """True if the ranks of a generation have been built, and with these layers."""
        for rank in range(4):
            file = self.folder / f"held-{generation}-{rank}"
            if not file.exists():
                return False
            stage = rank // 2
            first = sum(layers[:stage])
            assert json.loads(file.read_text()) == [*range(first, first + layers[stage])]
        return True

    def pods_of(self, generation: int) -> list[int]:
        """Pods of ranks, by rank."""
        return [int((self.folder / f"pod-{generation}-{rank}").read_text()) for rank in range(4)]

    def on_trial(self, generation: int, layers: Sequence[int]) -> None:
        """Wait until the ranks of a generation, with layers on trial, are held."""
        held = [self.folder / f"holds-{generation}-{rank}" for rank in range(4)]
        self.wait(f"{layers} are on trial", lambda: all(each.exists() for each in held))
        assert self.has(generation, layers)
        found = self.recoveries()
        assert (found.generation, found.layers) == (generation, list(layers)), self
        assert found.layout_before is not None


UNTOLD = 4
"""Maximum of iterations that an agent has not reported yet."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    job = LayersJob(tmp_path_factory.mktemp("layers") / "undisturbed")
    (job.folder / "hurry").touch()
    try:
        assert job.ends() == [0, 0], job
    finally:
        job.close()
    assert len(job.iterations()) == ITERATIONS
    return job.iterations()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    made: list[LayersJob] = []

    def start() -> LayersJob:
        made.append(LayersJob(tmp_path / "job"))
        return made[-1]

    yield start
    for job in made:
        job.close()


def ended(job: LayersJob, undisturbed: dict[int, float]) -> None:
    """Check the end of a job, with the losses of an undisturbed one."""
    (job.folder / "hurry").touch()
    assert set(job.ends()) == {0}, job
    iterations = job.iterations()
    assert iterations.items() <= undisturbed.items(), job
    # The pod with the agent may be lost before that has reported the last ones.
    assert len(iterations) >= len(undisturbed) - UNTOLD, job
    for each in job.recoveries().last:
        # The first iterations with another layout are not copied. A neighbour has older copies.
        changed = each.layers or each.places
        most = TRIAL_ITERATIONS + 1 if each.state == "neighbour" or changed else 0
        # Recoveries that were followed by another loss have no such figure.
        assert (each.repeated or 0) <= most, each


def test_layers_move_to_another_pod_and_stay_with_the_place_of_a_lost_one(
    started: Any, undisturbed: dict[int, float]
) -> None:
    """The ingest is replaced while the new parts are on trial. When they count, a pod is lost."""
    job = started()
    hold = job.at("hold", 1, done=1)
    job.ask(NEW, after=3)
    job.on_trial(1, NEW)
    job.ingest.kill()
    job.ingest.wait(DEADLINE)
    job.ingest = job.start_ingest()
    hold.unlink()
    job.wait("the new layers count", lambda: job.recoveries().layout_before is None)
    job.wait("the ranks go on", lambda: job.recovered(1))
    (move,) = job.recoveries().last
    assert move.cause == "layers move between stages: from layers 3, 3 to layers 4, 2"
    assert (move.layers, move.state, job.recoveries().count) == (NEW, "kept", 0)
    print(f"from leaving to the next finished iteration: {move.seconds} s")
    job.kill(1, replaced=True)
    job.pods[1] = job.start_pod(1)
    job.wait("another pod trains in the place of pod 1", lambda: job.recovered(2))
    found = job.recoveries()
    assert (found.last[1].replaced, found.layers, found.layout_before) == ([1], NEW, None)
    assert (found.last[1].state, found.last[1].layers) == ("neighbour", []), f"{found}\n{job}"
    assert job.has(2, NEW)
    ended(job, undisturbed)


def test_ranks_of_two_pods_exchange_places(started: Any, undisturbed: dict[int, float]) -> None:
    """Rank killed on trial, so that they go back; then others exchange theirs, which counts before
    a pod is lost. Rank 0 moves, too, whose pod the others look up."""
    job = started()
    job.at("kill", 1, done=1)
    job.ask({"places": [0, 2, 1, 3]}, after=3)
    job.wait("the ranks have gone back", lambda: job.recovered(2))
    found = job.recoveries()
    assert [each.places for each in found.last] == [[0, 2, 1, 3], [0, 1, 2, 3]]
    assert (found.places, found.layout_before, found.count) == ([], None, 1)
    assert [each.state for each in found.last] == [None, "kept"], found
    assert [job.pods_of(number) for number in range(3)] == [
        [0, 0, 1, 1],
        [0, 1, 0, 1],
        [0, 0, 1, 1],
    ]

    hold = job.at("hold", 3, done=TRIAL_ITERATIONS + 1)
    job.ask({"places": [3, 1, 2, 0]})
    job.wait("the ranks are held", (job.folder / "holds-3-0").exists)
    job.wait("the new places count", lambda: job.recoveries().layout_before is None)
    assert job.pods_of(3) == [1, 0, 1, 0]
    hold.unlink()
    job.wait("the ranks go on", lambda: job.recovered(3))
    move = job.recoveries().last[-1]
    assert (move.cause, move.state) == ("ranks 0, 3 change places", "kept")
    job.kill(1, replaced=True)
    job.pods[1] = job.start_pod(1)
    job.wait("another pod trains in the place of pod 1", lambda: job.recovered(4))
    found = job.recoveries()
    assert (found.places, found.last[-1].state) == ([3, 1, 2, 0], "replica"), f"{found}\n{job}"
    assert job.pods_of(4) == [1, 0, 1, 0]
    ended(job, undisturbed)


@pytest.mark.soak
def test_a_loss_on_trial_goes_back_to_the_layers_before(
    started: Any, undisturbed: dict[int, float]
) -> None:
    """A rank is lost, then a pod, whose state only a neighbour has. Then an ingest is killed that
    alone knows why ranks have ended."""
    job = started()
    job.at("kill", 1, done=0)
    job.ask(NEW, after=3)
    job.wait("the ranks have gone back", lambda: job.recovered(2))
    found = job.recoveries()
    assert [each.layers for each in found.last] == [NEW, OLD]
    assert (found.layers, found.layout_before, found.count) == ([], None, 1)
    assert found.last[1].state == "kept", found
    assert job.has(1, NEW) and job.has(2, OLD)

    job.at("hold", 3, done=1)
    job.ask([2, 4])
    job.on_trial(3, [2, 4])
    job.lose(1)
    job.wait("the ranks have gone back", lambda: job.recovered(4))
    found = job.recoveries()
    assert [each.layers for each in found.last[2:]] == [[2, 4], OLD]
    assert found.last[3].state == "neighbour", f"{found}\n{job}"
    assert job.has(4, OLD)

    (job.folder / "dies-at-a-move").touch()
    job.ask([1, 5])
    job.wait("the ingest is killed", lambda: job.ingest.poll() is not None)
    job.ingest = job.start_ingest()
    job.wait("the ranks go on", lambda: job.recovered(5))
    assert job.has(5, [1, 5]), job
    ended(job, undisturbed)
    found = job.recoveries()
    assert (found.layers, found.layout_before, found.count, found.counted) == ([1, 5], None, 2, 0)
