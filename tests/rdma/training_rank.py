"""Rank of a training job in a guest; training_launcher.py forks it.

Commands come as JSON lines, and answers go out as such:

  train   run iterations; the answer has every loss, as the hexadecimal of its bits. With `hold`
          this stage computes nothing before `proceed`, so that the iteration cannot end before
  state   where the rank is and its links' counters, also in the middle of an iteration
  finish  close the pipeline in peace and end
"""

import contextlib
import hashlib
import json
import os
import queue
import threading
import traceback
from typing import Any

import torch
from torch import Tensor, nn
from worker import stats_of

from pipemorph.errors import InputError
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph_trainer import Pipeline, PipelineError, TrainerContext

WIDTH = 8
HOLD_DEADLINE = 300.0
_answering = threading.Lock()
# Open unless this rank is held. Not of the stage, which the trainer may copy.
_gate = threading.Event()
_gate.set()


class Stage(nn.Module):
    """Little to compute and much to send: an emulated processor does 100 million operations
    a second."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(100 + index)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if not _gate.wait(HOLD_DEADLINE):
            raise TimeoutError(f"held for {HOLD_DEADLINE} s, and no command to proceed came")
        return x + torch.relu(self.linear(x))


class Momentum:
    """Stochastic gradient descent. Not torch's: its import brings the compiler, which takes a
    minute on an emulated processor."""

    def __init__(self, module: nn.Module, rate: float, momentum: float) -> None:
        self.rate, self.momentum = rate, momentum
        self.of = [(p, torch.zeros_like(p)) for p in module.parameters()]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, velocity in self.of:
            assert parameter.grad is not None
            velocity.mul_(self.momentum).add_(parameter.grad)
            parameter.sub_(velocity, alpha=self.rate)
            parameter.grad = None


def make_batch(iteration: int, rows: int) -> tuple[Tensor, Tensor]:
    """Input and target of shape (rows, WIDTH)."""
    generator = torch.Generator().manual_seed(iteration)
    x = torch.rand(rows // 1024, WIDTH, generator=generator).repeat(1024, 1)
    return x, x.flip(1)


def answer(number: int, **said: Any) -> None:
    line = memoryview(json.dumps({"number": number, **said}).encode() + b"\n")
    with _answering:
        while line:
            line = line[os.write(1, line) :]


class Rank:
    def __init__(self, seat: dict[str, Any], spec: dict[str, Any], rows: int) -> None:
        self.rows = rows * spec["schedule"]["microbatches"]
        job = PipeMorphJob.model_validate(
            {
                "apiVersion": "pipemorph.io/v1alpha1",
                "kind": "PipeMorphJob",
                "metadata": {"name": "guests"},
                "spec": spec,
            }
        )
        self.stage = Stage(seat["rank"])
        self.optimizer = Momentum(self.stage, rate=0.05, momentum=0.9)
        self.inside = False
        self.pipe = Pipeline(
            self.stage, context=TrainerContext(**seat, job=job), loss_fn=nn.functional.mse_loss
        )

    def train(self, until: int) -> dict[str, Any]:
        losses = []
        while self.pipe.iteration < until:
            x, target = make_batch(self.pipe.iteration, self.rows)
            self.inside = True
            loss = self.pipe.step(x, target=target)
            self.inside = False
            self.optimizer.step()
            losses.append(loss.item().hex())
        weights = hashlib.sha256()
        for parameter in self.stage.parameters():
            weights.update(parameter.detach().numpy().tobytes())
        return {"losses": losses, "weights": weights.hexdigest()}

    def state(self) -> dict[str, Any]:
        links = {}
        for end in self.pipe._parts.links.ends:
            assert end.engine_link is not None
            links[end.link] = {"route": end.route.value, **stats_of(end.engine_link)}
        return {"iteration": self.pipe.iteration, "inside": self.inside, "links": links}

    def serve(self, todo: "queue.Queue[dict[str, Any]]") -> int:
        """Carry out `train` and `finish`, on the main thread; the exit status."""
        while True:
            request = todo.get()
            try:
                if request["op"] == "finish":
                    # The manifest has more iterations than any test runs.
                    with contextlib.suppress(InputError):
                        self.pipe.close()
                    answer(request["number"], result=None)
                    return 0
                answer(request["number"], result=self.train(**request["arguments"]))
            except PipelineError as error:
                answer(request["number"], error=f"{type(error).__name__}: {error}")
                return 1
            except Exception:  # noqa: BLE001 - the test shows it
                answer(request["number"], error=traceback.format_exc()[-3000:])
                return 1


def run(number: int, commands: int, arguments: dict[str, Any]) -> int:
    """Join the job (`number` is the request to answer then) and obey; the exit status."""
    try:
        rank = Rank(**arguments)
    except Exception:  # noqa: BLE001 - the test shows it
        answer(number, error=traceback.format_exc()[-3000:])
        return 1
    answer(number, result=os.getpid())
    todo: queue.Queue[dict[str, Any]] = queue.Queue()

    def read() -> None:
        with os.fdopen(commands) as lines:
            for line in lines:
                request = json.loads(line)
                if request["op"] == "state":
                    answer(request["number"], result=rank.state())
                elif request["op"] == "proceed":
                    _gate.set()
                    answer(request["number"], result=None)
                else:
                    if request["arguments"].pop("hold", False):
                        _gate.clear()
                    todo.put(request)

    threading.Thread(target=read, daemon=True).start()
    return rank.serve(todo)
