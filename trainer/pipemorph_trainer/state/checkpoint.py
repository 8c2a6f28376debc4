"""Checkpoints of a pipeline, in ``torch.distributed.checkpoint``'s format.

Each stage stores its parameters under their own names. If no two stages use the same name (as with
layers numbered over the whole model), a checkpoint can be resumed with another number of stages. If
two stages do (``nn.Sequential`` numbers each stage from 0), names get the stage as a prefix and the
number of stages must stay.

Each rank also saves what its user added, and its random state (:mod:`.extra`).

During gradient accumulation ``.grad`` is state as well. It is saved where it is not zero, so that a
resumed run adds to it as an uninterrupted one does.

There is one folder per checkpoint, such as ``iteration-00000040``. torch writes ``.metadata`` last,
so a folder without it is unfinished and ignored.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from pipemorph.api.sections.trainer import Checkpoint
from pipemorph.errors import InputError
from pipemorph_trainer.errors import PipelineError, first_sentence
from pipemorph_trainer.executor.grad_form import grad_dtype, zero_grad
from pipemorph_trainer.executor.stages.emulated import EmulatedRunner
from pipemorph_trainer.executor.waiting import CollectiveWait
from pipemorph_trainer.state.extra import Extra
from pipemorph_trainer.state.names import Names, clash, own_names
from pipemorph_trainer.state.tied import Holder
from pipemorph_trainer.topology.groups import gather_values
from pipemorph_trainer.topology.world import World

log = logging.getLogger("pipemorph.trainer")

T = TypeVar("T")
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_ITERATION = "pipemorph.iteration"
_STAGES = "pipemorph.stages"
_KINDS = ("model.", "gradient.", "optimizer.state.", "optimizer.param_groups.")
"""What the names of values begin with."""


class Checkpoints:
    """Saves and resumes one pipeline. Every call is collective over all ranks.

    ``stages``: the modules of this rank's stages, or the runners of emulated ones. ``aliases``:
    tied weights of these modules, with their first holder, under whose name they are saved.
    ``extra``: of the user. ``asked.keep`` finished checkpoints are kept, older ones are deleted.
    ``wait``: waits for the other ranks before a failed write is raised.
    """

    def __init__(
        self,
        asked: Checkpoint,
        world: World,
        stages: Mapping[int, nn.Module | EmulatedRunner],
        optimizer: torch.optim.Optimizer | None,
        *,
        aliases: Mapping[Holder, Holder],
        extra: Extra,
        wait: CollectiveWait,
    ) -> None:
        self._directory, self._asked, self._world = Path(asked.directory), asked, world
        self._extra, self._wait_for = extra, wait
        self._group = world.control
        if asked.asynchronous:
            # Its collectives run in another thread, at any time between those of the control group.
            self._group = world.groups.new(backend="gloo", group_desc="pipemorph checkpoints")
        self._writing: tuple[Path, Future[Any]] | None = None
        self._modules = {s: each for s, each in stages.items() if isinstance(each, nn.Module)}
        self._emulated = {s: each for s, each in stages.items() if isinstance(each, EmulatedRunner)}
        # With a number before each name, so that one optimizer may have the parameters of all.
        self._module = nn.ModuleDict({str(stage): m for stage, m in self._modules.items()})
        self._optimizer = optimizer
        self._aliases = aliases
        self._keys: dict[str, str] = {}
        """The key in a checkpoint of each value of this rank."""
        self._prefixed = bool(self._modules) and self._share_names()
        """Whether names get the stage as a prefix."""

    def _share_names(self) -> bool:
        """Whether two stages of the pipeline have a tensor of the same name."""
        own = own_names(self._modules, self._aliases)
        stages = self._world.group(("pp",))
        found = clash([own] if stages is None else gather_values(own, Names, stages))
        if found is not None and self._world.coordinate.rank == 0:
            log.warning(
                "checkpoints: %s; names get the stage as a prefix, so these checkpoints resume with"
                " %d stages only", found, self._world.coordinate.stages,
            )  # fmt: skip
        return found is not None

    def save(self, iteration: int) -> Path:
        """Write a checkpoint to be resumed at ``iteration``; returns its folder.

        An asynchronous one is copied to host memory here, and written by a thread: it counts as
        finished when all ranks have written it. Raises :class:`PipelineError` on all ranks if one
        of them cannot write it, or could not write the one before.
        """
        self.finish()
        folder = self._directory / f"iteration-{iteration:08d}"
        if self._world.coordinate.rank == 0:
            # One of an earlier run would count as finished even if half overwritten. Rank 0 also
            # plans what each rank writes, so no rank writes before this.
            _remove(folder)
        state = self._state() | {
            name: parameter.grad
            for name, parameter in self._gradients()
            if parameter.grad is not None and parameter.grad.count_nonzero()
        }
        state[_ITERATION] = torch.tensor(iteration)
        state[_STAGES] = torch.tensor(self._world.coordinate.stages if self._prefixed else 0)
        state |= self._extra.pack()
        with _named(folder):
            if self._asked.asynchronous:
                written: Any = state_dict_saver.async_save(
                    state, checkpoint_id=folder, process_group=self._group
                )
                self._writing = folder, written
                return folder
            state_dict_saver.save(state, checkpoint_id=folder, process_group=self._group)
        self._remove_old()
        return folder

    @property
    def writing(self) -> Path | None:
        """The folder of the checkpoint that is being written; None if there is none."""
        return None if self._writing is None else self._writing[0]

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is finished. Raises
        :class:`PipelineError` on all ranks if one of them cannot write it."""
        if self._writing is None:
            return
        (folder, written), self._writing = self._writing, None
        with _named(folder):
            try:
                written.result()
            except CheckpointException:
                self._meet(folder)
                raise
        self._remove_old()

    def _meet(self, folder: Path) -> None:
        """Wait until all ranks know that a checkpoint cannot be written. Each finds that at the
        same point between two iterations, but others may not have come there: if this rank ended
        its connections before, they would fail in the iteration, of a lost peer."""
        work = dist.barrier(self._world.control, async_op=True)
        try:
            self._wait_for(work, f"all ranks to find that {folder} cannot be written")
        except PipelineError as error:
            # What is raised is why the write failed, whoever is lost besides.
            log.warning("%s", error)

    def _remove_old(self) -> None:
        if self._world.coordinate.rank == 0:
            for old in self._finished()[: -self._asked.keep]:
                _remove(old)

    def newest(self) -> int:
        """The iteration of the newest finished checkpoint that this rank sees; 0 without one."""
        finished = self._finished()
        return int(finished[-1].name.removeprefix("iteration-")) if finished else 0

    def resume(self) -> int:
        """Load the newest finished checkpoint; returns the iteration to continue with, 0 if there
        is none.

        Raises :class:`InputError` if it does not fit the module or the number of stages.
        """
        newest = None
        if self._world.coordinate.rank == 0 and (finished := self._finished()):
            newest = finished[-1]
        folder = self._world.share(newest, Path | None)
        if folder is None:
            return 0
        marks: dict[str, Any] = {_ITERATION: torch.tensor(0), _STAGES: torch.tensor(0)}
        state_dict_loader.load(marks, checkpoint_id=folder, process_group=self._world.control)
        stages = int(marks[_STAGES])
        if stages not in (0, self._world.coordinate.stages):
            raise InputError(
                f"{folder} was saved by {stages} stages that share parameter names; resume with "
                f"{stages} stages, not {self._world.coordinate.stages}"
            )
        saved = FileSystemReader(folder).read_metadata().state_dict_metadata
        gradients = [(name, p) for name, p in self._gradients() if name in saved]
        state = self._state() | {name: zero_grad(p) for name, p in gradients}
        moments = [k for name, k in self._keys.items() if name.startswith("optimizer.state.")]
        stepped = not moments or any(name in saved for name in moments)
        if not stepped:
            # Saved before the optimizer's first step: those that `_state` made count one too many.
            for name in {*moments}:
                del state[name]
        try:
            state_dict_loader.load(state, checkpoint_id=folder, process_group=self._world.control)
        except CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            raise InputError(f"{folder} does not fit this job: {first}") from error
        self._restore(state, stepped=stepped)
        for parameter, grad in _of_each([(p, name) for name, p in gradients], state):
            parameter.grad = grad
        packed = self._extra.chosen(saved)
        state_dict_loader.load(packed, checkpoint_id=folder, process_group=self._world.control)
        self._extra.unpack(packed)
        return int(marks[_ITERATION])

    def _finished(self) -> list[Path]:
        return sorted(path.parent for path in self._directory.glob("iteration-*/.metadata"))

    def _state(self) -> dict[str, Any]:
        if self._emulated:
            return {
                self._emulated_key(stage): torch.tensor(list(runner.state().to_bytes(8, "little")))
                for stage, runner in self._emulated.items()
            }
        state = {
            f"model.{name}": value
            for name, value in get_model_state_dict(self._module, options=_OPTIONS).items()
        }
        if self._optimizer is not None:
            with _beginning(self._optimizer):
                found: Any = get_optimizer_state_dict(
                    self._module, self._optimizer, options=_OPTIONS
                )
            state |= {f"optimizer.{name}": v for name, v in found.items()}
        self._keys = {name: self._key(name) for name in state}
        return {self._keys[name]: value for name, value in state.items()}

    def _emulated_key(self, stage: int) -> str:
        return f"emulated.replica{self._world.coordinate.column}.stage{stage}"

    def _key(self, name: str) -> str:
        """The key of a value in a checkpoint.

        ``name``: ``model.`` or ``gradient.``, a stage and a parameter; ``optimizer.state.`` or
        ``optimizer.param_groups.``, a stage, a parameter and one of its fields.
        """
        kind = next(kind for kind in _KINDS if name.startswith(kind))
        number, _, rest = name.removeprefix(kind).partition(".")
        stage = int(number)
        for alias, (shared, first) in self._aliases.items():
            if alias.stage == stage and (
                rest == alias.name or (kind[0] == "o" and rest.startswith(f"{alias.name}."))
            ):
                stage, rest = first, shared + rest[len(alias.name) :]
                break
        return f"{f'stage{stage}.' if self._prefixed else ''}{kind}{rest}"

    def _gradients(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters, with the names of their gradients in a checkpoint. Two holders of a tied
        weight have one name."""
        return [
            (self._key(f"gradient.{name.replace('_orig_mod.', '')}"), parameter)
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad
        ]

    def _restore(self, state: dict[str, Any], *, stepped: bool) -> None:
        for stage, runner in self._emulated.items():
            value = state[self._emulated_key(stage)]
            runner.restore(int.from_bytes(bytes(value.tolist()), "little"))
        if not self._modules:
            return

        def part(kind: str) -> dict[str, Any]:
            start = f"{kind}."
            mine = [
                (name.removeprefix(start), key)
                for name, key in self._keys.items()
                if name.startswith(start) and key in state
            ]
            return dict(_of_each(mine, state))

        set_model_state_dict(self._module, part("model"), options=_OPTIONS)
        if self._optimizer is None:
            return
        if not stepped:
            self._optimizer.state.clear()
        else:
            loaded = part("optimizer")
            with _beginning(self._optimizer):
                set_optimizer_state_dict(self._module, self._optimizer, loaded, options=_OPTIONS)
            self._widen(loaded)

    def _widen(self, loaded: Mapping[str, Any]) -> None:
        """Give the optimizer's state the dtype that it was saved in: torch casts that of a
        parameter to the parameter's, as the momentum of gradients in float32."""
        assert self._optimizer is not None
        for name, parameter in self._module.named_parameters():
            mine = self._optimizer.state.get(parameter, {})
            for field, value in mine.items():
                saved = loaded.get(f"state.{name.replace('_orig_mod.', '')}.{field}")
                if (
                    isinstance(saved, Tensor)
                    and isinstance(value, Tensor)
                    and saved.dtype != value.dtype
                ):
                    mine[field] = torch.empty_like(value, dtype=saved.dtype).copy_(saved)


def _of_each(holders: Iterable[tuple[T, str]], state: Mapping[str, Any]) -> Iterator[tuple[T, Any]]:
    """The loaded values, given the key of each holder. If two stages of this rank hold a tied
    weight, the second one gets a copy: each writes to its own gradient and optimizer state."""
    given: set[str] = set()
    for holder, key in holders:
        value = state[key]
        yield holder, value.clone() if key in given and isinstance(value, Tensor) else value
        given.add(key)


def check_directory(directory: Path) -> None:
    """Raise :class:`InputError` if the folder for checkpoints cannot be written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise InputError(
            f"spec.checkpoint.directory: {directory} cannot be written to: {error.strerror}"
        ) from None


@contextmanager
def _beginning(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context in which torch need not make the state of an optimizer that has not stepped.

    torch does so by a step with a learning rate of 0 on gradients of zeros. It makes them in the
    dtype of their parameters, which those with gradients of another one refuse.
    """
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"] if p.requires_grad]
    if (
        optimizer.state
        or any(p.grad is not None for p in parameters)
        or all(grad_dtype(p) == p.dtype for p in parameters)
    ):
        yield
        return
    rates = [(group, group["lr"]) for group in groups if "lr" in group]
    try:
        _assign_zeros(parameters)
        for group, rate in rates:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        optimizer.step()
        # Again, since hooks of the step may remove them: torch leaves an optimizer without state,
        # as SGD, alone if there are gradients.
        _assign_zeros(parameters)
        for group, rate in rates:
            group["lr"] = rate
        yield
    finally:
        for group, rate in rates:
            group["lr"] = rate
        for parameter in parameters:
            parameter.grad = None


def _assign_zeros(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = zero_grad(parameter)


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Name the folder, and the first rank that failed, in errors of writing it."""
    try:
        yield
    except CheckpointException as error:
        rank, (why, _) = next(iter(error.failures.items()))
        raise PipelineError(
            f"{folder} cannot be written: rank {rank}: {first_sentence(why)}"
        ) from error
    except RuntimeError as error:
        raise PipelineError(f"{folder} cannot be written: {first_sentence(error)}") from error


def _remove(folder: Path) -> None:
    """Delete a checkpoint, first the file that marks it as finished."""
    (folder / ".metadata").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
