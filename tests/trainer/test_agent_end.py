"""An agent that ends while its ranks train on."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from launch import Ranks
from torch import nn

from pipemorph_trainer import Pipeline, TrainerContext
from pipemorph_trainer.agent import AgentHandle

INGEST = "http://127.0.0.1:9"
"""Nobody listens there, which an agent bears."""


def train(context: TrainerContext, signal_number: int | None) -> float:
    """Four iterations; after the first of them rank 0's agent gets the signal."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=4, policy="1f1b"
    ) as pipe:
        for iteration in range(4):
            loss = pipe.step(torch.ones(8, 4), target=torch.zeros(8, 4))
            if iteration == 0 and context.rank == 0 and signal_number is not None:
                assert pipe._agent is not None and pipe._agent.alive
                pipe._agent.process.send_signal(signal_number)
                pipe._agent.process.wait(20)
        return float(loss)


@pytest.mark.parametrize("signal_number", [9, None])
def test_the_end_of_the_agent_is_told_once_and_training_goes_on(signal_number: int | None) -> None:
    context = {"secret": b"secret", "ingest_url": INGEST}
    zero, one = Ranks(2, train, signal_number, context=context).wait(100)
    assert (zero.exitcode, one.exitcode) == (0, 0), zero.error + one.error + zero.output
    told = (
        "the agent has ended (killed by SIGKILL): nothing is reported or adapted any more, "
        "training goes on with the plan in force"
    )
    assert zero.output.count("the agent has ended") == (signal_number is not None), zero.output
    assert (told in zero.output) == (signal_number is not None)
    assert "the agent has ended" not in one.output


def test_an_exit_is_told_with_its_code(caplog: pytest.LogCaptureFixture) -> None:
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(2)"], stdin=-1)
    handle = AgentHandle("127.0.0.1", 1, process)
    process.wait(20)
    handle.tell_end()
    handle.tell_end()
    handle.close()
    assert [m.partition(":")[0] for m in caplog.messages] == ["the agent has ended (exit 2)"]
