"""Resumed runs are equal to the bit, also with another number of stages."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from float32_gradients import in_float32, rounding
from gate import same_bits
from launch import Ranks, run_ranks
from pairwise import give_tiers
from torch import Tensor, nn

from pipemorph.checkpoints import UnfinishedCheckpoint
from pipemorph.errors import InputError
from pipemorph.spec.sections.trainer import Checkpoint
from pipemorph_trainer import EmulatedStage, Pipeline, TrainerContext
from pipemorph_trainer.checkpoint.checked_files import _ChecksumStream
from pipemorph_trainer.checkpoint.disk import DiskCheckpointer
from pipemorph_trainer.checkpoint.memory.resume_point import ResumePoint
from pipemorph_trainer.errors import UnwrittenError

# Several runs in a test, each with a deadline of its own.
pytestmark = [pytest.mark.timeout(400)]

LAYERS, WIDTH, MICROBATCHES = 4, 6, 4


class Layers(nn.Module):
    """Model with some of the layers, named by their place in it."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        per = LAYERS // stages
        self.layers = nn.ModuleDict()
        for layer in range(stage * per, (stage + 1) * per):
            torch.manual_seed(layer)
            self.layers[str(layer)] = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def entry(
    context: TrainerContext, folder: str, until: int, emulated: bool, anonymous: bool = False
) -> tuple[int, list[float]]:
    return train(context, folder, until, emulated=emulated, anonymous=anonymous)


def accumulating(
    context: TrainerContext, folder: str, until: int, optimizer: str = "AdamW", low: bool = False
) -> tuple[int, list[float]]:
    return train(context, folder, until, accumulated=4, optimizer=optimizer, low=low)


def stateless(context: TrainerContext, folder: str, until: int) -> tuple[int, list[float]]:
    return train(context, folder, until, accumulated=2, optimizer="SGD", low=True)


def train(
    context: TrainerContext,
    folder: str,
    until: int,
    *,
    emulated: bool = False,
    anonymous: bool = False,
    accumulated: int = 1,
    optimizer: str = "AdamW",
    low: bool = False,
) -> tuple[int, list[float]]:
    """Train with a checkpoint every two steps, and one of the optimizer every ``accumulated``.
    ``low``: in bfloat16, with gradients in float32."""
    stages = context.world_size
    module: nn.Module = Layers(context.rank, stages)
    if anonymous:
        module = nn.Sequential(*module.layers.values())  # type: ignore[union-attr, arg-type]
    if low:
        in_float32(module)
    # SGD takes such gradients as they are.
    if optimizer != "AdamW":
        momentum = 0.9 if optimizer == "momentum" else 0.0
        made: torch.optim.Optimizer = torch.optim.SGD(
            module.parameters(), lr=0.05, momentum=momentum
        )
    else:
        made = torch.optim.AdamW(module.parameters(), lr=0.05)
        made = rounding(made) if low else made
    losses = []
    with Pipeline(
        EmulatedStage(0.001, 0.001, 0.001, 1024) if emulated else module,
        context=context,
        loss_fn=lambda output, target: (output - target).square().mean(),
        microbatches=MICROBATCHES,
        optimizer=made,
        checkpoint=Checkpoint(directory=folder, every=2),
    ) as pipe:
        for iteration in range(pipe.start_iteration, until):
            generator = torch.Generator().manual_seed(iteration)
            x = torch.randn(MICROBATCHES, WIDTH, generator=generator)
            x = x.bfloat16() if low else x
            losses.append(float(pipe.step(x, target=x.flip(1))))
            if iteration % accumulated == accumulated - 1:
                made.step()
                made.zero_grad()
    if optimizer == "momentum" and until > accumulated:
        # Losses in bfloat16 do not show it.
        dtypes = [state["momentum_buffer"].dtype for state in made.state.values()]
        assert dtypes == [torch.float32] * len(list(module.parameters()))
    return pipe.start_iteration, losses


@pytest.fixture(scope="module")
def cut_short(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[bool], tuple[Path, list[float]]]:
    """The checkpoints of a run of two stages that ended after iteration 4 of 8, and the losses of
    one that did not; emulated or not."""

    @cache
    def made(emulated: bool) -> tuple[Path, list[float]]:
        folder = tmp_path_factory.mktemp("cut_short")
        whole = run_ranks(2, entry, str(folder / "whole"), 8, emulated)
        cut = run_ranks(2, entry, str(folder / "cut"), 5, emulated)
        assert cut[0] == (0, whole[0][1][:5])
        return folder / "cut", whole[0][1]

    return made


@pytest.mark.parametrize(
    ("stages", "emulated"),
    give_tiers([(2, False), (4, False), (1, False), (2, True)], test=1, full=3),
)
def test_resume_goes_on_to_the_bit(
    stages: int,
    emulated: bool,
    cut_short: Callable[[bool], tuple[Path, list[float]]],
    tmp_path: Path,
) -> None:
    folder, losses = cut_short(emulated)
    shutil.copytree(folder, tmp_path / "cut")
    # Saved after iterations 2 and 4; iteration 4 was not: resumed from there, run again.
    resumed = run_ranks(stages, entry, str(tmp_path / "cut"), 8, emulated)
    assert all(result == (4, losses[4:]) for result in resumed)


# Before the optimizer's first step, when it has no moments yet, and after it.
@pytest.mark.parametrize(
    ("cut", "optimizer", "low"),
    # The momentum of gradients in float32 is in float32.
    give_tiers(
        [
            (2, "AdamW", True), (6, "AdamW", False), (6, "SGD", True), (2, "momentum", True),
            (6, "AdamW", True), (2, "AdamW", False), (2, "SGD", True), (6, "momentum", True),
        ],
        test=1, full=3,
    ),
)  # fmt: skip
def test_an_accumulation_goes_on_where_it_was_saved(
    cut: int, optimizer: str, low: bool, tmp_path: Path
) -> None:
    whole = run_ranks(1, accumulating, str(tmp_path / "whole"), 9, optimizer, low)
    run_ranks(2, accumulating, str(tmp_path / "cut"), cut, optimizer, low)
    resumed = run_ranks(1, accumulating, str(tmp_path / "cut"), 9, optimizer, low)
    assert resumed == [(cut, whole[0][1][cut:])]


def test_gradients_in_float32_between_steps_of_an_optimizer_without_state(tmp_path: Path) -> None:
    """Saved when there is no gradient, and no state of the optimizer either."""
    whole = run_ranks(1, stateless, str(tmp_path / "whole"), 6)
    run_ranks(1, stateless, str(tmp_path / "cut"), 5)
    assert run_ranks(1, stateless, str(tmp_path / "cut"), 6) == [(4, whole[0][1][4:])]


@pytest.mark.full
def test_only_finished_checkpoints_count_and_old_ones_go(tmp_path: Path) -> None:
    stray = UnfinishedCheckpoint(tmp_path, 6, "killed while it saved")
    os.close(stray._fd)
    run_ranks(2, entry, str(tmp_path), 7, False)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["iteration-00000004", "iteration-00000006"]
    (tmp_path / "iteration-00000006" / ".metadata").unlink()
    assert run_ranks(2, entry, str(tmp_path), 5, False)[0][0] == 4


@pytest.mark.full
def test_names_that_stages_share_fix_the_number_of_stages(tmp_path: Path) -> None:
    run_ranks(2, entry, str(tmp_path), 2, False, True)
    assert run_ranks(2, entry, str(tmp_path), 3, False, True)[0][0] == 2
    results = Ranks(4, entry, str(tmp_path), 3, False, True).wait()
    assert "resume with 2 stages, not 4" in results[0].error


@pytest.mark.full
def test_a_folder_that_cannot_be_written_is_reported_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (result,) = Ranks(1, entry, str(tmp_path / "file"), 2, False).wait()
    assert "InputError: spec.checkpoint.directory: " in result.error
    assert "/file cannot be written to: File exists" in result.error


REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)


def on_a_bad_disk(context: TrainerContext, folder: str) -> None:
    """The disk of rank 1 refuses the writes of one checkpoint after another, then some other step
    of rank 0; the last one is written."""
    write, finish, made = _ChecksumStream.write, UnfinishedCheckpoint.write_checksums, Path.mkdir
    refusals = iter(REFUSALS)
    module = nn.Linear(WIDTH, WIDTH)
    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=MICROBATCHES,
        checkpoint=Checkpoint(directory=folder, every=1),
    ) as pipe:  # fmt: skip
        published = pipe._parts.reporter.publish
        said: list[str] = []

        def publish(**fields: Any) -> None:
            if fields.get("lost_checkpoint"):
                said.append(str(fields["message"]))
            published(**fields)

        pipe._parts.reporter.publish = publish  # type: ignore[method-assign, assignment]
        x = torch.ones(MICROBATCHES, WIDTH)
        pipe.step(x, target=x)
        for number in refusals:

            def refuse(*_: Any, number: int = number, **__: Any) -> Any:
                raise OSError(number, os.strerror(number))

            if context.rank == 1:
                _ChecksumStream.write = refuse  # type: ignore[method-assign]
            pipe.step(x, target=x)
            _ChecksumStream.write = write  # type: ignore[method-assign]
        if context.rank == 0:
            UnfinishedCheckpoint.write_checksums = refuse  # type: ignore[method-assign]
        pipe.step(x, target=x)
        UnfinishedCheckpoint.write_checksums = finish  # type: ignore[method-assign]
        if context.rank == 0:
            Path.mkdir = refuse  # type: ignore[method-assign]
        pipe.step(x, target=x)
        with pytest.raises(UnwrittenError, match="rank 0: File too large"):
            pipe.save()
        Path.mkdir = made  # type: ignore[method-assign]
        assert context.rank or not list(Path(folder).iterdir())
        pipe.step(x, target=x)
    if context.rank == 0:
        causes = [f"rank 1: [Errno {n}] {os.strerror(n)}" for n in REFUSALS]
        causes += ["rank 0: [Errno 27] File too large", "rank 0: File too large"]
        assert all(cause in text for cause, text in zip(causes, said, strict=True)), said
        assert len(list(Path(folder).iterdir())) == 2


def test_a_disk_that_refuses_costs_the_checkpoint_and_not_the_job(tmp_path: Path) -> None:
    run_ranks(2, on_a_bad_disk, str(tmp_path))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "flipped": ("__1_0.distcp", flip, "__1_0.distcp has other bytes than were written"),
    "flipped in rank 0": ("__0_0.distcp", flip, "__0_0.distcp has other bytes than were written"),
    "cut": ("__0_0.distcp", cut, "__0_0.distcp has"),
    "empty": ("__1_0.distcp", lambda path: path.write_bytes(b""), "has 0 bytes instead of "),
    "gone": ("__1_0.distcp", Path.unlink, "__1_0.distcp: No such file"),
    "metadata flipped": (".metadata", flip, ".metadata has other bytes than were written"),
    "metadata cut": (".metadata", cut, ".metadata has"),
    "metadata gone": (".metadata", Path.unlink, ".metadata: No such file"),
    "manifest gone": ("pipemorph.json", Path.unlink, "its pipemorph.json is missing"),
    "manifest cut": ("pipemorph.json", cut, "pipemorph.json is damaged"),
}


def from_damaged(context: TrainerContext, folder: str) -> dict[str, tuple[int, str]]:
    """Resume from the checkpoints in each folder. Returns with which iteration, and why."""
    found, resumes, resume = {}, list[ResumePoint](), DiskCheckpointer.resume

    def resuming(self: DiskCheckpointer) -> ResumePoint:
        resumes.append(resume(self))
        return resumes[-1]

    DiskCheckpointer.resume = resuming  # type: ignore[method-assign]
    for directory in sorted(Path(folder).iterdir()):
        module = Layers(context.rank, context.world_size)
        with Pipeline(
            module, context=context, loss_fn=nn.functional.mse_loss, microbatches=MICROBATCHES,
            optimizer=torch.optim.AdamW(module.parameters()),
            checkpoint=Checkpoint(directory=str(directory), every=99),
        ) as pipe:  # fmt: skip
            found[directory.name] = (pipe.start_iteration, resumes[-1].why)
    return found


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    cut_short: Callable[[bool], tuple[Path, list[float]]], tmp_path: Path
) -> None:
    folder, losses = cut_short(False)
    for name, (file, spoil, _) in DAMAGE.items():
        shutil.copytree(folder, tmp_path / name)
        spoil(tmp_path / name / "iteration-00000004" / file)
    results = run_ranks(2, from_damaged, str(tmp_path))
    assert results[0] == results[1]
    for name, (_, _, why) in DAMAGE.items():
        began, reason = results[0][name]
        assert began == 2 and reason.startswith("iteration-00000004 was skipped: "), (name, reason)
        assert why in reason, (name, reason)
    # The run is equal to the bit from there; the damaged file stays: another run wrote it.
    again = run_ranks(2, entry, str(tmp_path / "flipped"), 8, False)
    assert again[0] == (2, losses[2:])
    assert (tmp_path / "flipped" / "iteration-00000004").exists()


@pytest.mark.full
def test_nothing_begins_anew_if_all_checkpoints_are_damaged(
    cut_short: Callable[[bool], tuple[Path, list[float]]], tmp_path: Path
) -> None:
    shutil.copytree(cut_short(False)[0], tmp_path / "cut")
    for path in (tmp_path / "cut").glob("*/__0_0.distcp"):
        flip(path)
    for result in Ranks(2, entry, str(tmp_path / "cut"), 8, False).wait():
        assert re.search(
            r"InputError: no checkpoint in .* can be used: iteration-00000004 was skipped: .*;"
            r" iteration-00000002 was skipped: .*checkpoint.resume: false",
            result.error,
        ), result.error[-2000:]


def misfits(context: TrainerContext, folder: str) -> list[str]:
    """Errors for checkpoints of whole models with those of less, and the other way round."""
    errors = []

    def attempt(module: nn.Module, state: dict[str, Any], make: Any = torch.optim.AdamW) -> None:
        optimizer = make(module.parameters()) if make is not None else None
        before = {name: value.clone() for name, value in module.state_dict().items()}
        with pytest.raises(InputError, match="does not fit this job: ") as refused:
            Pipeline(
                module, context=context, loss_fn=nn.functional.mse_loss, microbatches=1,
                optimizer=optimizer, state=state,
                checkpoint=Checkpoint(directory=folder, every=99),
            )  # fmt: skip
        errors.append(str(refused.value).partition("does not fit this job: ")[2])
        for name, value in module.state_dict().items():
            same_bits(value, before[name])

    def layers(count: int, width: int = WIDTH) -> nn.Module:
        return nn.ModuleDict({str(i): nn.Linear(width, width) for i in range(count)})

    whole = layers(2)
    given = {"sampler": torch.optim.lr_scheduler.StepLR(torch.optim.SGD(whole.parameters()), 1)}
    with Pipeline(
        whole, context=context, loss_fn=nn.functional.mse_loss, microbatches=1, state=given,
        optimizer=torch.optim.AdamW(whole.parameters()),
        checkpoint=Checkpoint(directory=folder, every=99),
    ) as pipe:  # fmt: skip
        pipe._parts.optimizer.step()  # type: ignore[union-attr]
        pipe.save()
    attempt(layers(1), given)
    attempt(layers(3), given)
    attempt(layers(2, WIDTH + 1), given)
    attempt(layers(2), given, None)
    attempt(layers(2), given, torch.optim.SGD)
    attempt(layers(2), {})
    attempt(layers(2), {**given, "more": given["sampler"]})
    frozen = layers(2)
    frozen["1"].requires_grad_(False)  # type: ignore[index]
    attempt(frozen, given)
    return errors


def test_state_without_a_reader_or_without_a_writer_is_refused(tmp_path: Path) -> None:
    (errors,) = run_ranks(1, misfits, str(tmp_path))
    lacks = "rank 0: the checkpoint lacks "
    assert errors == [
        "no rank takes model.1.bias and 29 more",
        f"{lacks}model.2.bias and 29 more",
        "rank 0: model.0.weight has the shape [7, 7], the saved one [6, 6]",
        "no rank takes optimizer.param_groups.0.bias.amsgrad and 55 more",
        f"{lacks}optimizer.param_groups.0.bias.dampening and 11 more",
        "no rank has state['sampler']",
        "the checkpoint lacks state['more']",
        "no rank takes optimizer.state.1.bias.exp_avg and 5 more",
    ]
