"""A rank is killed while replicas have unequal numbers of microbatches: ``pipemorph run`` goes on
with every sample, and with the bits of a plain loop under the same decisions."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from local_runs import manifest, run

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

STAGES, REPLICAS, ITERATIONS = 2, 2, 24
SCRIPT = '''
import json, os, random, signal
from pathlib import Path
from time import sleep
import torch
from torch import nn
from torch.utils.data import DataLoader
from pipemorph_trainer import Microbatch, Pipeline, TrainerContext
from pipemorph_trainer.data import BalancedBatchSampler

SAMPLES, BATCH, MICROBATCHES, WIDTH = 100, 24, 4, 8
kills = False

class Stage(nn.Module):
    def __init__(self, number, seconds=0.0):
        super().__init__()
        torch.manual_seed(number)
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x):
        if kills:
            os.kill(os.getpid(), signal.SIGKILL)
        sleep(self.seconds)
        return x + torch.tanh(self.linear(x))

def sum_losses(output, target):
    """Sum over rows; the last column of the target is 0 for rows of padding."""
    return ((output - target[:, :-1]).pow(2).sum(1) * target[:, -1]).sum()

def make_sampler(replica):
    costs = [random.Random(i).uniform(1, 3) for i in range(SAMPLES)]
    return BalancedBatchSampler(
        costs, batch_size=BATCH, replicas=2, replica=replica, microbatches=MICROBATCHES, stages=2,
    )

def make_microbatch(indices):
    """Microbatch of BATCH rows, since all need one shape."""
    x, target = torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, WIDTH + 1)
    for row, index in enumerate(indices):
        draw = torch.Generator().manual_seed(index)
        x[row] = torch.randn(WIDTH, generator=draw)
        target[row] = torch.cat([x[row].roll(1), torch.ones(1)])
    return Microbatch((x,), {}, target, weight=len(indices))

class Recorded:
    """Source of another one's microbatches, which writes down what is drawn."""

    def __init__(self, source, write, dies):
        self.source, self.write, self.dies, self.unequal = source, write, dies, 0

    def draw_step(self, shares):
        found = self.source.draw_step(shares)
        rows = [indices for indices, _ in found.microbatches]
        self.write({"shares": list(shares), "samples": rows})
        self.unequal += len(set(shares)) > 1
        global kills
        kills = self.dies and self.unequal == 2
        return found._replace(microbatches=[each for _, each in found.microbatches])

def collate(indices):
    return indices, make_microbatch(indices)

def main():
    context = TrainerContext.from_env()
    torch.set_num_threads(1)
    place, generation = context.coordinate(), int(os.environ["PIPEMORPH_GENERATION"])
    file = open(Path(context.args["folder"]) / f"rank-{context.rank}.jsonl", "a")

    def write(line):
        line |= {"iteration": pipe.iteration, "stage": place.stage, "replica": place.replica}
        print(json.dumps(line), file=file, flush=True)

    stage = Stage(place.stage, 0.02)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.05)
    sampler = make_sampler(place.replica)
    # The worker draws ahead.
    loader = DataLoader(
        range(SAMPLES), batch_sampler=sampler, collate_fn=collate, num_workers=1,
        prefetch_factor=8,
    )
    dies = generation == 0 and context.rank == 1
    source = Recorded(sampler.make_source(loader), write, dies)
    with Pipeline(
        stage, context=context, loss_fn=sum_losses, optimizer=optimizer,
        state={"sampler": sampler},
    ) as pipe:
        while pipe.iteration < context.job.spec.trainer.iterations:
            loss = pipe.step(microbatches=source)
            write({"loss": float(loss)})
            optimizer.step()
            optimizer.zero_grad()

if __name__ == "__main__":
    main()
'''


def train_plainly(
    names: dict[str, Any], decisions: list[tuple[int, ...]]
) -> tuple[list[float], list[list[list[list[int]]]]]:
    """Train in one process with the shares of each iteration. Returns losses, and the samples of
    each iteration by replica and microbatch."""
    stages = [names["Stage"](number) for number in range(STAGES)]
    optimizers = [torch.optim.SGD(stage.parameters(), lr=0.05) for stage in stages]
    sampler, losses, samples = names["make_sampler"](0), [], []
    for step, shares in enumerate(decisions):
        sampler.set_shares(shares)
        rows = [[list(each) for each in own] for own in sampler.deal_samples(step).samples]
        divisor = sum(len(each) for own in rows for each in own) / REPLICAS
        totals, grads = [], []
        for own in rows:
            total = 0.0
            for indices in own:
                made = names["make_microbatch"](indices)
                loss = names["sum_losses"](stages[1](stages[0](*made.args)), made.target)
                total += float(loss.detach())
                (loss / divisor).backward()
            totals.append(total / divisor)
            grads.append([p.grad for stage in stages for p in stage.parameters()])
            for optimizer in optimizers:
                optimizer.zero_grad()
        losses.append(float(torch.tensor(sum(totals) / REPLICAS, dtype=torch.float32)))
        for p, *both in zip((p for s in stages for p in s.parameters()), *grads, strict=True):
            p.grad = sum(both) / REPLICAS
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        samples.append(rows)
    return losses, samples


def test_a_kill_with_unequal_shares_loses_no_sample(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    job = manifest(
        parallelism={"stages": STAGES, "replicas": REPLICAS, "order": ["dp_replicate", "pp"]},
        schedule={"microbatches": 4},
        emulation=None,
        adaptation={"rebalance": True},
        failurePolicy={"maxRestarts": 2},
        trainer={
            "command": ["python", str(script)],
            "iterations": ITERATIONS,
            "threads": 1,
            "args": {"folder": str(tmp_path)},
        },
        faults=[{"device": 2, "slowdown": 3.0, "fromIteration": 4, "toIteration": ITERATIONS}],
    )
    done = run(tmp_path, job)
    assert done.status == 0, done
    assert len(done.report["recoveries"]) == 1, done
    (recovery,) = done.report["recoveries"]
    assert recovery["rung"] == "generation", done
    went_on = recovery["went_on_with"]
    lines = [
        json.loads(line)
        for file in sorted(tmp_path.glob("rank-*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    # An iteration that ran again replaces the one before the kill.
    drawn = {
        (line["iteration"], line["stage"], line["replica"]): line
        for line in lines
        if "shares" in line
    }
    decisions = [tuple(drawn[k, 0, 0]["shares"]) for k in range(ITERATIONS)]
    before = [line.get("shares") for line in lines if line["iteration"] == went_on]
    assert any(shares[0] != shares[1] for shares in before if shares), "not killed when unequal"
    names = runpy.run_path(str(script))
    losses, samples = train_plainly(names, decisions)
    equal, _ = train_plainly(names, [(4, 4)] * ITERATIONS)
    for (iteration, _, replica), line in drawn.items():
        assert tuple(line["shares"]) == decisions[iteration]
        assert line["samples"] == samples[iteration][replica]
    assert len(drawn) == ITERATIONS * STAGES * REPLICAS
    found = {line["iteration"]: line["loss"] for line in lines if "loss" in line}
    found = [found[k + 1] for k in range(ITERATIONS)]
    assert found == losses, "to the bit, under the same decisions"
    assert found == pytest.approx(equal, rel=1e-5)
