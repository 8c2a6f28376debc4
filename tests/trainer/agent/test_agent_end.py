"""An agent that ends while its ranks train on."""

from __future__ import annotations

import os
import socket
import sys
import time

import pytest
import torch
import torch.distributed as dist
from launch import Ranks
from torch import nn

from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer import Pipeline, TrainerContext
from pipemorph_trainer.agent import AgentClient, AgentProcess
from pipemorph_trainer.agent.agent_process import AgentConfig

INGEST = "http://127.0.0.1:9"
"""Address without a listener, which an agent bears."""


def train(context: TrainerContext, killed: bool) -> list[int]:
    """Iterations until both ranks have a line to the agent, which is killed after the first if
    ``killed``. Returns how often this rank's line was lost."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=4, policy="1f1b"
    ) as pipe:
        line = pipe._parts.control
        assert isinstance(line, AgentClient)
        lost = []
        for losses in range(2 if killed else 1):
            deadline = time.monotonic() + 60
            while True:
                pipe.step(torch.ones(8, 4), target=torch.zeros(8, 4))
                up = torch.tensor(int(line.ready and line.reconnects == losses))
                dist.all_reduce(up, dist.ReduceOp.MIN)
                if up:
                    break
                assert time.monotonic() < deadline, f"no line to agent {losses + 1} within 60 s"
            lost.append(line.reconnects)
            if context.rank == 0 and killed and losses == 0:
                pipe._parts.agent.process.kill()
                pipe._parts.agent.process.wait(20)
        return lost


@pytest.mark.parametrize("killed", [pytest.param(True, marks=pytest.mark.full), False])
def test_an_agent_that_ends_is_followed_by_another_while_training_goes_on(killed: bool) -> None:
    context = {"secret": b"secret", "ingest_url": INGEST}
    zero, one = Ranks(2, train, killed, context=context).wait(100)
    assert (zero.exitcode, one.exitcode) == (0, 0), zero.error + one.error + zero.output
    assert zero.value == one.value == ([0, 1] if killed else [0])
    ended = "the agent has ended (killed by SIGKILL): nothing is reported or adapted until another"
    for said, times in ((ended, killed), ("the agent has been started again", killed)):
        assert zero.output.count(said) == times, zero.output
    assert "the agent has" not in one.output


@pytest.mark.parametrize(
    ("program", "how"),
    [
        ("raise SystemExit(2)", "exit 2"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 40)", "killed by signal 40"),
    ],
)
def test_one_that_does_not_last_is_started_less_and_less_often(
    program: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = AgentConfig(
        job="gpt", namespace="default", attempt=0, mesh=MeshShape(1), secret_hex="00",
        ingest_url=INGEST, token_file=None, listen_fd=0, parent=os.getpid(),
    )  # fmt: skip
    now = 100.0
    listener = socket.create_server(("127.0.0.1", 0))
    ends_at_once = (sys.executable, "-I", "-S", "-c", program)
    handle = AgentProcess(config, listener, "127.0.0.1", command=ends_at_once, clock=lambda: now)
    pauses, began = [], now
    while len(pauses) < 9:
        process = handle.process
        process.wait(20)
        handle.restart_if_ended()
        handle.restart_if_ended()
        if handle.process is process:
            now += 0.5
        else:
            pauses.append(now - began)
            began = now
    handle.close()
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    said = [message.partition(":")[0] for message in caplog.messages]
    assert said == [f"the agent has ended ({how})", "the agent has been started again"] * 9
