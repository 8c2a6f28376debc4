"""The state of a rank with another part is composed of copies of several ranks, by names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipemorph.errors import InputError
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer import ModelShard
from pipemorph_trainer.checkpoint.memory.composition import ComposedState, StageCopy, compose_state
from pipemorph_trainer.checkpoint.memory.layer_loans import (
    LayerLoan,
    LayerNeeds,
    copy_lent_layers,
    find_memory_shortage,
    list_nearest_stages,
    plan_loans,
)
from pipemorph_trainer.checkpoint.memory.rank_state import RankState
from pipemorph_trainer.checkpoint.memory.state_copy import StateCopy
from pipemorph_trainer.checkpoint.movable_state import find_move_obstacle as why_stays
from pipemorph_trainer.checkpoint.user_state import UserState
from pipemorph_trainer.checkpoint.value_names import find_name_clash
from pipemorph_trainer.topology.model_shard import find_move_obstacle

TOTAL = 6
Groups = Callable[[nn.Module], list[dict[str, Any]]]


def of_rank(*numbers: int, seed: int, groups: Groups) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.ModuleDict(
        {str(n): nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for n in numbers}
    )
    return module, torch.optim.AdamW(groups(module), lr=1e-2)


def in_two(module: nn.Module) -> list[dict[str, Any]]:
    parameters = list(module.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in parameters if p.ndim < 2], "lr": 0.5},
    ]


def by_layer(module: nn.Module) -> list[dict[str, Any]]:
    """A learning rate for each layer."""
    return [
        {"params": list(layer.parameters()), "lr": 1 / (1 + int(name))}
        for name, layer in module.named_children()
    ]


def values(stage: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> RankState:
    place = MeshShape(stages=2).find_coordinate(stage)
    return RankState({stage: module}, {}, optimizer, UserState({}, place, torch.device("cpu")))


def source_of(
    folder: Path, stage: int, module: nn.Module, optimizer: torch.optim.Optimizer
) -> StageCopy:
    """A copy after a step."""
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return copy_of(folder, stage, values(stage, module, optimizer))


def copy_of(folder: Path, stage: int, held: RankState) -> StageCopy:
    held.capture_batch_state()
    form, tensors, content = held.collect_state()
    copy = StateCopy.create(folder / f"copy-{stage}", form, len(content))
    copy.write_tensors(tensors)
    copy.write_object(content)
    copy.finish_write({})
    return StageCopy(StateCopy.open(copy.path) or copy, stage)


def states(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, value in module.state_dict().items():
        yield name, value
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        yield f"{name}.grad", parameter.grad
        for key, value in optimizer.state[parameter].items():
            yield f"{name}.{key}", value


@pytest.mark.parametrize("borrows", [False, True])
@pytest.mark.parametrize("groups", [in_two, by_layer])
def test_every_value_comes_from_the_rank_that_had_it(
    tmp_path: Path, groups: Groups, borrows: bool
) -> None:
    """``borrows``: the other rank is in another pod, and sends the missing layers."""
    before = [of_rank(0, 1, 2, seed=1, groups=groups), of_rank(3, 4, 5, seed=2, groups=groups)]
    sources = [source_of(tmp_path, stage, *each) for stage, each in enumerate(before)]
    expected = {n: v for each in before for n, v in states(*each)}
    for stage, numbers in enumerate([(0, 1, 2, 3), (4, 5)]):
        module, optimizer = of_rank(*numbers, seed=9, groups=groups)
        new = values(stage, module, optimizer)
        requested: list[int] = []
        lacking = {*new.list_wanted().names} - {*sources[stage].held_names}

        def others(
            stage: int = stage, requested: list[int] = requested, lacking: set[str] = lacking
        ) -> Iterator[StageCopy]:
            requested.append(1 - stage)
            theirs = sources[1 - stage]
            if borrows:
                part = copy_lent_layers(theirs, lacking, tmp_path / "lent")
                sizes = theirs.bytes_by_name
                assert sum(sizes[name] for name in lacking) == sum(
                    entry.nbytes for entry in part.form
                )
                # A layer of three.
                assert (
                    0
                    < 2 * part.view_tensor_bytes().numel()
                    < theirs.copy.view_tensor_bytes().numel()
                )
                assert not (tmp_path / "lent").exists()
                theirs = StageCopy(part, 1 - stage)
            yield theirs

        found = compose_state(sources[stage], others(), new.list_wanted())
        assert isinstance(found, ComposedState)
        assert not new.find_misfit(found.form, found.pickled_object)
        new.apply_state(found, own=True)
        for name, value in states(module, optimizer):
            assert torch.equal(value, expected[name]), name
        for mine, theirs in zip(optimizer.param_groups, groups(module), strict=True):
            assert all(mine[key] == value for key, value in theirs.items() if key != "params")
        # Only what a rank lacks is read from another's copy.
        assert requested == ([1] if stage == 0 else [])


@pytest.mark.parametrize(
    ("stage", "expected"), [(0, [1, 2, 3, 4]), (2, [1, 3, 0, 4]), (4, [3, 2, 1, 0])]
)
def test_other_stages_come_in_the_order_of_their_distance(stage: int, expected: list[int]) -> None:
    mesh = MeshShape(stages=5)
    assert list(list_nearest_stages(mesh.find_coordinate(mesh.find_rank(stage, 0)))) == expected


def test_layers_come_from_the_nearest_stage_of_the_column_and_through_memory_if_shared() -> None:
    """Stages are three, × two replicas; each replica lacks the same."""
    mesh = MeshShape(stages=3, replicas=2)
    held, wanted = ["ab", "cd", "ef"], ["abc", "d", "ef"]
    memories = {(0, 0): "x", (1, 0): "x", (2, 0): "y", (0, 1): "z", (1, 1): "y", (2, 1): "y"}

    def layer_needs(wanted: list[str]) -> list[LayerNeeds]:
        places = map(mesh.find_coordinate, range(6))
        return [
            LayerNeeds(memories[each.stage, each.column], 50, *(
                () if each.column else (dict.fromkeys(held[each.stage], 10), wanted[each.stage])
            ))
            for each in places
        ]  # fmt: skip

    at = mesh.find_rank
    few = plan_loans(layer_needs(wanted), mesh)
    assert few == [LayerLoan(at(1, 1), at(0, 1), frozenset("c"), 10)]
    assert find_memory_shortage(few, layer_needs(wanted)) == ""
    needs = layer_needs(["abcde", "e", "f"])
    many = plan_loans(needs, mesh)
    assert sorted(many) == sorted(
        [
            LayerLoan(at(2, 0), at(0, 0), frozenset("e"), 10),
            LayerLoan(at(2, 0), at(1, 0), frozenset("e"), 10),
            LayerLoan(at(1, 1), at(0, 1), frozenset("cd"), 20),
            LayerLoan(at(2, 1), at(0, 1), frozenset("e"), 10),
        ]
    )
    assert find_memory_shortage(many, needs) == (
        f"rank {at(0, 1)} has no memory for layers that move to and from other pods: they take 30"
        " bytes, more than half of the 50 bytes that are free"
    )
    assert find_memory_shortage(many, [replace(each, free_bytes=60) for each in needs]) == ""
    assert plan_loans(layer_needs(["ab", "cd", "ef"]), mesh) == []


def test_state_that_no_rank_holds_is_named(tmp_path: Path) -> None:
    sources = [source_of(tmp_path, 0, *of_rank(0, 1, seed=1, groups=in_two))]
    new = values(0, *of_rank(0, 1, 2, seed=9, groups=in_two))
    found = compose_state(sources[0], [], new.list_wanted())
    assert found == "no rank has a copy of the buffer 2.1.num_batches_tracked"


def test_a_group_has_the_hyperparameters_of_its_parameters(tmp_path: Path) -> None:
    one, other = of_rank(0, 1, seed=1, groups=in_two), of_rank(2, 3, seed=2, groups=in_two)
    other[1].param_groups[1]["lr"] = 0.25
    sources = [source_of(tmp_path, 0, *one), source_of(tmp_path, 1, *other)]
    new = values(0, *of_rank(0, 1, 2, seed=9, groups=in_two))
    found = compose_state(sources[0], sources[1:], new.list_wanted())
    assert isinstance(found, str)
    assert found.startswith(
        "the optimizer's group 1 has parameters of groups that differed, such as 0."
    )


def test_two_stages_that_share_a_name_are_found() -> None:
    assert find_name_clash([{0: ["a", "b"]}, {1: ["c"]}]) is None
    assert str(find_name_clash([{0: ["a", "b"]}, {1: ["b"]}])) == "stages 0 and 1 both have 'b'"


def test_a_part_has_the_layers_that_the_host_gives_it() -> None:
    parts = [ModelShard(stage, 3, (1, 3, 2)) for stage in range(3)]
    assert [list(part.layers(6)) for part in parts] == [[0], [1, 2, 3], [4, 5]]
    with pytest.raises(InputError, match="splits 7 layers; the host splits 6"):
        parts[0].layers(7)


def test_parts_that_cannot_change_say_why() -> None:
    part = ModelShard(0, 2)
    assert "no function that builds it" in find_move_obstacle(None, 6)
    assert "does not call part.layers()" in find_move_obstacle([part], 6)
    part.layers(6)
    assert find_move_obstacle([part], 6) == ""
    assert "splits 6 layers, and spec.parallelism.layers is 8" in find_move_obstacle([part], 8)


class Rotary(nn.Module):
    """A layer with a table that is not saved and has one name on all stages, as in models with
    rotary embeddings."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(n): nn.Linear(3, 3) for n in numbers})
        self.register_buffer("table", torch.rand(3), persistent=False)


def test_buffers_that_are_not_saved_stay_as_they_were_built(tmp_path: Path) -> None:
    sources = []
    for stage, numbers in enumerate([(0, 1, 2), (3,)]):
        module = Rotary(*numbers)
        optimizer = torch.optim.AdamW(module.parameters())
        sources.append(source_of(tmp_path, stage, module, optimizer))
    new = Rotary(2, 3)
    built = new.table.clone()
    mine = values(1, new, torch.optim.AdamW(new.parameters()))
    assert "buffer.table" not in mine.list_wanted().tensors
    found = compose_state(sources[1], sources[:1], mine.list_wanted())
    assert isinstance(found, ComposedState)
    assert not mine.find_misfit(found.form, found.pickled_object)
    mine.apply_state(found, own=True)
    assert torch.equal(new.table, built)
    assert torch.equal(
        new.layers["2"].weight, sources[0].copy.tensors["parameter.0.layers.2.weight"]
    )


class Holder:
    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state


def test_what_users_add_stays_only_if_it_is_of_no_part() -> None:
    module, optimizer = of_rank(0, 1, seed=1, groups=in_two)
    schedulers = torch.optim.lr_scheduler
    other = torch.optim.SGD(module.parameters(), lr=0.1)
    same: Any = lambda epoch: 0.9**epoch  # noqa: E731
    fine = {
        "plain": schedulers.ExponentialLR(optimizer, 0.9),
        "in turns": schedulers.SequentialLR(
            optimizer,
            [schedulers.LinearLR(optimizer), schedulers.CosineAnnealingLR(optimizer, 9)], [3],
        ),
        "same": schedulers.LambdaLR(optimizer, same),
        "seen": Holder({"tokens": 7, "loss": torch.zeros(())}),
    }  # fmt: skip
    for name, value in fine.items():
        assert why_stays({name: value}, optimizer, {"0.0.weight"}, set()) == "", name
    refused: dict[str, tuple[Any, str]] = {
        "optimizer": (other, "an optimizer"),
        "averaged": (torch.optim.swa_utils.AveragedModel(module), "a module"),
        "shadow": (Holder({"shadow": [torch.zeros(3)]}), "a tensor"),
        "named": (Holder({"seen": {"0.0.weight": 1}}), "a value of 0.0.weight"),
        "of other": (schedulers.ExponentialLR(other, 0.9), "another optimizer"),
        "plateau": (schedulers.ReduceLROnPlateau(optimizer), "min_lrs, a value for each group"),
        "several": (schedulers.LambdaLR(optimizer, [same, lambda _: 1.0]), "a function for each"),
    }
    for name, (value, why) in refused.items():
        assert why in why_stays({name: value}, optimizer, {"0.0.weight"}, set()), name
    # A loader has the state of its random numbers.
    assert not why_stays({"shadow": refused["shadow"][0]}, optimizer, set(), {"shadow"})


def test_a_schedule_goes_on_with_the_learning_rates_of_the_new_part(tmp_path: Path) -> None:
    """Layers have rates of their own, and so a group each."""

    def rank(*numbers: int, stage: int) -> tuple[nn.Module, torch.optim.Optimizer, Any, RankState]:
        module, optimizer = of_rank(*numbers, seed=stage, groups=by_layer)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        place = MeshShape(stages=2).find_coordinate(stage)
        extra = UserState({"schedule": schedule}, place, torch.device("cpu"))
        return module, optimizer, schedule, RankState({stage: module}, {}, optimizer, extra)

    sources = []
    for stage, numbers in enumerate([(0, 1, 2), (3, 4, 5)]):
        _, optimizer, schedule, held = rank(*numbers, stage=stage)
        optimizer.step()
        schedule.step()
        sources.append(copy_of(tmp_path, stage, held))
    _, optimizer, schedule, new = rank(2, 3, 4, 5, stage=1)
    found = compose_state(sources[1], sources[:1], new.list_wanted())
    assert isinstance(found, ComposedState)
    new.apply_state(found, own=True)
    assert schedule.base_lrs == pytest.approx([1 / 3, 1 / 4, 1 / 5, 1 / 6])
    schedule.step()
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == pytest.approx([1 / 12, 1 / 16, 1 / 20, 1 / 24])
