"""State that is saved besides parameters, when, and while training goes on."""

from __future__ import annotations

import os
import resource
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from gate import same_bits
from launch import Ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from trainer_jobs import Loader

from pipemorph.errors import InputError
from pipemorph.spec.sections.trainer import Checkpoint
from pipemorph_trainer import Pipeline, TrainerContext
from pipemorph_trainer.executor.mailbox import Mailbox
from pipemorph_trainer.executor.waiting import CurrentWait
from pipemorph_trainer.schedule.pipeline_builder import PipelineComponents

pytestmark = [pytest.mark.timeout(400)]

WIDTH, N, STAGES = 6, 4, 2


def make_stage(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.3))


def train(
    context: TrainerContext, folder: str, until: int, options: dict[str, Any], every: int = 2
) -> tuple[int, list[float]]:
    """Train with dropout, a learning-rate schedule and a loader, which all have state."""
    module: Any = make_stage(context.coordinate(STAGES).stage)
    loader, losses = Loader(N, WIDTH), []

    def made(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
        return {"scheduler": scheduler, "data": loader}

    def sgd(stage: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(stage.parameters(), lr=0.5)

    built = {"optimizer": sgd, "state": made}
    if not options.get("by_functions"):
        optimizer = sgd(module)
        built = {"optimizer": optimizer, "state": made(optimizer)}
    else:
        module = lambda part: make_stage(part.stage)  # noqa: E731
    saving = {name: value for name, value in options.items() if name != "by_functions"}
    torch.manual_seed(context.rank)
    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=N, stages=STAGES,
        checkpoint=Checkpoint(directory=folder, every=every, **saving), **built,
    ) as pipe:  # fmt: skip
        batches = iter(loader)
        for _ in range(pipe.start_iteration, until):
            x = next(batches)
            losses.append(float(pipe.step(x, target=x.flip(1))))
            pipe.optimizer.step()
            pipe.optimizer.zero_grad()
            pipe.state["scheduler"].step()
    return pipe.start_iteration, losses


@pytest.mark.parametrize(
    ("options", "until"),
    [
        pytest.param({}, 4, marks=pytest.mark.full, id="end"),
        pytest.param({}, 5, marks=pytest.mark.full, id="now"),
        pytest.param({"asynchronous": True}, 5, id="async"),
        pytest.param({"by_functions": True}, 4, marks=pytest.mark.full, id="by functions"),
    ],
)
def test_random_state_and_objects_of_the_user_go_on(
    options: Any, until: int, tmp_path: Path
) -> None:
    """Saved at the end, or before a step whose batch was drawn already."""
    whole = run_ranks(2, train, str(tmp_path / "whole"), 7, options)
    run_ranks(2, train, str(tmp_path / "cut"), until, {**options, "keep": 1})
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["iteration-00000004"]
    for (_, losses), (began, resumed) in zip(
        whole, run_ranks(2, train, str(tmp_path / "cut"), 7, options), strict=True
    ):
        assert (began, resumed) == (4, losses[4:])


def meanwhile(context: TrainerContext, folder: str) -> None:
    """The write of a checkpoint is held up until training has gone on and changed the weights."""
    go_on, begun = threading.Event(), threading.Event()
    write = FileSystemWriter.write_data

    def held_up(self: Any, *args: Any) -> Any:
        begun.set()
        assert go_on.wait(60), "training did not go on"
        return write(self, *args)

    FileSystemWriter.write_data = held_up  # type: ignore[method-assign]
    module = make_stage(context.rank).eval()
    options = {"directory": folder, "every": 100, "asynchronous": True}
    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=N,
        checkpoint=Checkpoint.model_validate(options),
    ) as pipe:  # fmt: skip
        x = torch.ones(N, WIDTH)
        pipe.step(x, target=x)
        saved = {n: v.clone() for n, v in module.state_dict().items()}
        path = pipe.save()
        assert path == Path(folder) / "iteration-00000001"
        for _ in range(2):
            pipe.step(x, target=x)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(1.0)
        assert begun.wait(60)
        assert not (path / ".metadata").exists()
        go_on.set()
        # The second save waits for the first.
        second = pipe.save()
        assert (path / ".metadata").exists()
    if context.rank == 0:
        assert (second / ".metadata").exists()
        (second / ".metadata").unlink()
    module = make_stage(context.rank)
    for parameter in module.parameters():
        parameter.detach().zero_()
    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=N,
        checkpoint=Checkpoint(directory=folder, every=100),
    ) as pipe:  # fmt: skip
        assert pipe.start_iteration == 1
    for name, value in module.state_dict().items():
        same_bits(value, saved[name], name)


@pytest.mark.full
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    run_ranks(2, meanwhile, str(tmp_path))


def behind(marker: Path) -> None:
    """Hold this rank at the end of the last iteration until ``marker`` exists."""
    wait, calls = Mailbox.wait_until_sends_taken, count(1)

    def held(self: Mailbox) -> None:
        if next(calls) == 4:
            until = time.monotonic() + 60
            while not marker.exists():
                assert time.monotonic() < until, "the other rank did not look at the write"
                time.sleep(0.01)
        wait(self)

    Mailbox.wait_until_sends_taken = held  # type: ignore[method-assign]


def ahead(marker: Path) -> None:
    """Create ``marker`` when this rank waits for the others after a failed write, or has ended."""
    begin, close = CurrentWait.begin_wait, PipelineComponents.close

    def began(self: CurrentWait, what: Any, *args: Any) -> None:
        begin(self, what, *args)
        if isinstance(what, str) and what.endswith("cannot be written"):
            marker.touch()

    def closed(self: PipelineComponents, **options: Any) -> None:
        close(self, **options)
        marker.touch()

    CurrentWait.begin_wait, PipelineComponents.close = began, closed  # type: ignore[method-assign]


def with_a_broken_write(context: TrainerContext, folder: str, late: int | None = None) -> None:
    marker = Path(folder) / "marker"
    if late is not None:
        (behind if context.rank == late else ahead)(marker)
    if context.rank == 1:
        FileSystemWriter.write_data = lambda *_: 1 // 0  # type: ignore[method-assign]
    train(context, folder, 4, {"asynchronous": True})


@pytest.mark.parametrize(
    "late", [0, *(pytest.param(each, marks=pytest.mark.full) for each in (None, 1))]
)
def test_a_write_that_fails_later_is_reported_on_every_rank(
    late: int | None, tmp_path: Path
) -> None:
    """The rank that finds it may be ahead of another one, ``late``, in the iteration before."""
    for result in Ranks(2, with_a_broken_write, str(tmp_path), late).wait():
        last = result.error.strip().splitlines()[-1]
        assert "iteration-00000002 cannot be written: rank 1: " in last, result.error[-2000:]


def with_a_lost_peer(context: TrainerContext, folder: str) -> None:
    if context.rank == 1:
        FileSystemWriter.write_data = lambda *_: os._exit(3)  # type: ignore[method-assign]
    train(context, folder, 4, {})


def test_a_peer_that_is_lost_while_it_writes_is_no_disk_that_refuses(tmp_path: Path) -> None:
    last = Ranks(2, with_a_lost_peer, str(tmp_path)).wait()[0].error.strip().splitlines()[-1]
    assert "PeerLostError" in last and "iteration-00000002 is not finished: " in last, last


def with_little_room(context: TrainerContext, folder: str) -> tuple[int, list[float]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if context.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        return train(context, folder, 4, {"asynchronous": True})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_refuses_later_costs_the_checkpoint(tmp_path: Path) -> None:
    results = Ranks(2, with_little_room, str(tmp_path)).wait()
    assert [result.exitcode for result in results] == [0, 0], results[0].error
    assert results[0].output.count("a checkpoint is lost, and training goes on: ") == 2
    assert "iteration-00000004 cannot be written: rank 1: " in results[0].output
    assert not list(tmp_path.iterdir())


def accumulated(context: TrainerContext, folder: str) -> dict[str, list[Tensor]]:
    """Gradients after steps without and with an average over replicas. Checkpoints are due after
    iterations 1 and 3; the first one is in an accumulation."""
    place, found = context.coordinate(STAGES), {}
    replica, module = place.replica, make_stage(place.stage).eval()
    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=N, stages=STAGES,
        checkpoint=Checkpoint(directory=folder, every=1, keep=9),
    ) as pipe:  # fmt: skip
        for kind in ("whole", "parts"):
            for number in range(3):
                x = torch.full((N, WIDTH), float(number + 3 * replica))
                if kind == "parts" and number < 2:
                    with pipe.no_sync():
                        pipe.step(x, target=x)
                    with pytest.raises(InputError, match=r"after a step in no_sync\(\)"):
                        pipe.save()
                else:
                    pipe.step(x, target=x)
                if number == 0:
                    found[f"first of {kind}"] = [p.grad.clone() for p in module.parameters()]
            found[kind] = [p.grad.clone() for p in module.parameters()]
            module.zero_grad()
    return found


def test_replicas_average_once_per_accumulation(tmp_path: Path) -> None:
    results = run_ranks(4, accumulated, str(tmp_path))
    for mine, other in zip(results[0]["first of parts"], results[1]["first of parts"], strict=True):
        assert not torch.equal(mine, other)
    for rank, found in enumerate(results):
        for whole, parts in zip(found["whole"], found["parts"], strict=True):
            torch.testing.assert_close(parts, whole)
            assert parts.any()
        for mine, first in zip(found["parts"], results[rank // 2 * 2]["parts"], strict=True):
            same_bits(mine, first)
    saved = sorted(int(path.name[-2:]) for path in tmp_path.iterdir())
    assert saved == [1, 2, 3, 6]


def without_folder(context: TrainerContext) -> None:
    with (
        Pipeline(
            make_stage(0), context=context, loss_fn=nn.functional.mse_loss, microbatches=N
        ) as pipe,
        pytest.raises(InputError, match="needs a folder: give Pipeline checkpoint="),
    ):
        pipe.save()


@pytest.mark.full
def test_save_needs_a_folder_and_state_needs_methods(tmp_path: Path) -> None:
    run_ranks(1, without_folder)
    for result in Ranks(1, stateless, str(tmp_path)).wait():
        assert "InputError: state has 'count', a int; expected an object with" in result.error


def stateless(context: TrainerContext, folder: str) -> None:
    checkpoint = Checkpoint(directory=folder, every=1)
    Pipeline(
        make_stage(0), context=context, loss_fn=nn.functional.mse_loss, microbatches=N,
        checkpoint=checkpoint, state={"count": 3},
    )  # fmt: skip
