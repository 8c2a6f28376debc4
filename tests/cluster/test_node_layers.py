"""Layers move between the stages of a job whose ranks are real pods, since one computes slowly."""

from __future__ import annotations

import re
from statistics import median
from typing import NamedTuple

import pytest
from node_support import START, TRAINER_IMAGE, Jobs, Object, all_told, condition
from testbed import wait_for

from pipemorph.planning import StageTimes, plan, problem_for

pytest_plugins = ("node_fixtures",)
# Its goal is a share of time. The same in pods of this machine: trainer/launcher.
pytestmark = [pytest.mark.node, pytest.mark.soak, pytest.mark.timeout(600)]

LAYERS, LAYER_SECONDS, SLOWDOWN, MICROBATCHES = 10, 0.01, 1.5, 8
EVEN, BEST = [5, 5], [6, 4]
SLOW_FROM, UNDISTURBED = 12, 150
SETTLES, COMPARED = 8, 16
"""Iterations after a move in which plans settle, and those that are looked at then."""
SHARE = 0.8
"""Goal: of what the best split would save."""

SCRIPT = """
import time
import torch
from torch import nn
from pipemorph_trainer import Pipeline, TrainerContext

context = TrainerContext.from_env()
SECONDS = context.args["seconds"]

class Stage(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.layers = nn.ModuleDict()
        for number in part.layers(context.job.spec.parallelism.layers):
            # The state of the beginning depends on no split.
            torch.manual_seed(number)
            self.layers[str(number)] = nn.Linear(8, 8)

    def forward(self, x):
        time.sleep(SECONDS * len(self.layers))
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x))
        return x

optimizer = lambda stage: torch.optim.Adam(stage.parameters(), 1e-2)
loss_fn = nn.functional.mse_loss
with Pipeline(Stage, context=context, optimizer=optimizer, loss_fn=loss_fn) as pipe:
    while (iteration := pipe.iteration) < context.job.spec.trainer.iterations:
        batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(iteration))
        pipe.optimizer.zero_grad()
        began = time.monotonic()
        loss = pipe.step(batch, target=batch.flip(1))
        pipe.optimizer.step()
        if context.rank == 0:
            took = time.monotonic() - began
            print("iteration", iteration, took, loss.item().hex(), flush=True)
"""


class Iteration(NamedTuple):
    """``loss``: exactly, in hexadecimal."""

    seconds: float
    loss: str


def test_a_stage_on_a_slow_device_gets_fewer_layers(node_jobs: Jobs) -> None:
    """Layers of which each sleeps, on a device that becomes 1.5 times slower: it is seen, decided,
    and done by the ingest in its pod. Losses are those of a job that nothing happens to."""
    script = {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "script"}}
    node_jobs.apply(script | {"data": {"train.py": SCRIPT}})
    node_jobs.apply(_job("even", UNDISTURBED, seconds=0.0))
    node_jobs.wait("even", all_told, 180.0)
    undisturbed = _iterations(node_jobs, "even")
    assert len(undisturbed) == UNDISTURBED
    node_jobs.delete("even")

    slow = {"device": 1, "slowdown": SLOWDOWN, "fromIteration": SLOW_FROM}
    node_jobs.apply(_job("uneven", 100_000, seconds=LAYER_SECONDS, faults=[slow]))
    node_jobs.wait("uneven", "Running", START)
    before = {pod["metadata"]["uid"] for pod in node_jobs.pods("uneven")}
    job = node_jobs.wait("uneven", _moved, 240.0)
    (record,) = job["status"]["recoveries"]["last"]
    assert record["layers"] == job["status"]["recoveries"]["layers"] == BEST, record
    assert (record["state"], job["status"]["recoveries"]["count"]) == ("kept", 0), record
    first = record["wentOnWith"]
    wait_for(
        "iterations with other layers",
        lambda: max(_iterations(node_jobs, "uneven")) >= first + SETTLES + COMPARED,
        120.0,
        details=lambda: node_jobs.logs("uneven"),
    )
    found = _iterations(node_jobs, "uneven")
    assert {pod["metadata"]["uid"] for pod in node_jobs.pods("uneven")} == before
    even = median(found[each].seconds for each in range(3, SLOW_FROM))
    slowed = median(found[each].seconds for each in range(SLOW_FROM, first) if each in found)
    now = median(
        found[each].seconds
        for each in found
        if first + SETTLES <= each < first + SETTLES + COMPARED
    )
    share = (slowed - now) / (_planned(EVEN) - _planned(BEST))
    print(
        f"seconds of an iteration: {even:.3f}, slow {slowed:.3f}, with {BEST} layers {now:.3f},"
        f" {record['seconds']} s between; of what the best split would save, by the planner:"
        f" {share:.0%}; {condition(job, 'StagesEven').get('message')}"
    )
    assert share >= SHARE
    both = found.keys() & undisturbed.keys()
    assert max(both) > first, f"no iteration with other layers is compared: {first} was the first"
    assert {each: found[each].loss for each in both} == {
        each: undisturbed[each].loss for each in both
    }
    node_jobs.delete("uneven")


def _job(name: str, iterations: int, *, seconds: float, **spec: object) -> Object:
    """Two pods of a rank each."""
    container = {
        "name": "trainer",
        "image": TRAINER_IMAGE,
        "resources": {"requests": {"cpu": "250m"}},
        "volumeMounts": [{"name": "script", "mountPath": "/script"}],
    }
    volume = {"name": "script", "configMap": {"name": "script"}}
    return {
        "apiVersion": "pipemorph.io/v1alpha1",
        "kind": "PipeMorphJob",
        "metadata": {"name": name},
        "spec": {
            "parallelism": {"stages": 2, "layers": LAYERS},
            "schedule": {"microbatches": MICROBATCHES},
            "trainer": {
                "command": ["python", "/script/train.py"],
                "iterations": iterations,
                "args": {"seconds": seconds},
            },
            "adaptation": {"relayout": True},
            "failurePolicy": {"maxRestarts": 1},
            "template": {"spec": {"containers": [container], "volumes": [volume]}},
        }
        | spec,
    }


def _moved(job: Object) -> bool:
    """Other layers are no longer on trial, and it is known since which iteration."""
    found = job.get("status", {}).get("recoveries") or {}
    last = (found.get("last") or [{}])[-1]
    return (
        bool(found.get("layers"))
        and found.get("layersBefore") is None
        and last.get("wentOnWith") is not None
        and last.get("seconds") is not None
    )


def _iterations(node_jobs: Jobs, name: str) -> dict[int, Iteration]:
    """What rank 0 has printed; of an iteration that ran twice the last."""
    pod = node_jobs.pods(name)[0]["metadata"]["name"]
    said = node_jobs.nodes.kubectl("logs", f"--namespace={node_jobs.namespace}", pod)
    lines = re.findall(r"iteration (\d+) (\S+) (-?0x\S+)", said)
    return {int(number): Iteration(float(took), loss) for number, took, loss in lines}


def _planned(layers: list[int]) -> float:
    """Seconds of an iteration with so many layers per stage, while the second device is slow."""
    times = [
        StageTimes(forward=LAYER_SECONDS * count * factor, backward_input=0, backward_weight=0)
        for count, factor in zip(layers, (1.0, SLOWDOWN), strict=True)
    ]
    return plan(problem_for(MICROBATCHES, times, [0.0])).makespan
