"""A resumed run goes on to the bit, also with another number of stages."""

from __future__ import annotations

import re
import resource
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from float32_gradients import in_float32, rounding
from launch import Ranks, run_ranks
from pairwise import give_tiers
from torch import Tensor, nn

from pipemorph.api.sections.trainer import Checkpoint
from pipemorph_trainer import EmulatedStage, Pipeline, TrainerContext

# Several runs in a test, each with a deadline of its own.
pytestmark = [pytest.mark.timeout(400)]

LAYERS, WIDTH, MICROBATCHES = 4, 6, 4


class Layers(nn.Module):
    """Some of the layers of a model, named by their place in it."""

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
        kept = [state["momentum_buffer"].dtype for state in made.state.values()]
        assert kept == [torch.float32] * len(list(module.parameters()))
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
    stray = tmp_path / "iteration-00000006" / "__7_0.distcp"
    stray.parent.mkdir()
    stray.write_text("of a run that was killed while it saved")
    run_ranks(2, entry, str(tmp_path), 7, False)
    assert not stray.exists()
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
def test_a_folder_that_cannot_be_written_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (result,) = Ranks(1, entry, str(tmp_path / "file"), 2, False).wait()
    assert "InputError: spec.checkpoint.directory: " in result.error
    assert "/file cannot be written to: File exists" in result.error


def entry_with_little_room(context: TrainerContext, folder: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if context.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        entry(context, folder, 4, False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_checkpoint_that_cannot_be_written_is_told_on_every_rank(tmp_path: Path) -> None:
    for result in Ranks(2, entry_with_little_room, str(tmp_path)).wait():
        last = result.error.strip().splitlines()[-1]
        assert re.search(
            r"PipelineError: .*/iteration-00000002 cannot be written: rank 1: .*too large", last
        ), result.error[-2000:]
