"""Checkpoints of a pipeline, in ``torch.distributed.checkpoint``'s format.

Each stage stores its parameters under their own names. If no two stages use the same name (as with
layers numbered over the whole model), a checkpoint can be resumed with another number of stages. If
two stages do (``nn.Sequential`` numbers each stage from 0), names get the stage as a prefix and the
number of stages must stay.

Each rank also saves what its user added, and its random state (:mod:`.extra`).

During gradient accumulation ``.grad`` is state as well. It is saved where it is not zero, so that a
resumed run adds to it as an uninterrupted one does.

There is one folder per checkpoint, see :mod:`pipemorph.checkpoints`. torch writes ``.metadata``
last, so a folder without it is unfinished. Files are compared with their checksums before any is
loaded; if some are damaged, the next older checkpoint is tried.
"""

from __future__ import annotations

import logging
import tempfile
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
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

from pipemorph import checkpoints
from pipemorph.api.sections.trainer import Checkpoint
from pipemorph.errors import InputError
from pipemorph.wire import IterationSample
from pipemorph_trainer.errors import (
    PeerLostError,
    PipelineError,
    UnwrittenError,
    first_sentence,
)
from pipemorph_trainer.executor.grad_form import grad_dtype, zero_grad
from pipemorph_trainer.executor.stages.emulated import EmulatedRunner
from pipemorph_trainer.executor.waiting import CollectiveWait
from pipemorph_trainer.state.checkpoint_files import Writer, damage
from pipemorph_trainer.state.extra import Extra
from pipemorph_trainer.state.kept.resumed import Resumed
from pipemorph_trainer.state.names import Names, clash, own_names
from pipemorph_trainer.state.tied import Holder
from pipemorph_trainer.topology.groups import gather_values
from pipemorph_trainer.topology.world import World

log = logging.getLogger("pipemorph.trainer")

_SAMPLES: TypeAdapter[Sequence[IterationSample]] = TypeAdapter(list[IterationSample])
T = TypeVar("T")
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_ITERATION = "pipemorph.iteration"
_STAGES = "pipemorph.stages"
_UNREPORTED = "pipemorph.unreported"
"""Iterations before, of rank 0, that the host of the run may not have: JSON."""
_SUMMED = "pipemorph.summed"
"""Saved where there are checksums: if their file is missing, it is not of an earlier release."""
_KINDS = ("model.", "gradient.", "optimizer.state.", "optimizer.param_groups.")
"""What the names of values begin with."""


class Checkpoints:
    """Saves and resumes one pipeline. Every call is collective over all ranks.

    ``stages``: the modules of this rank's stages, or the runners of emulated ones. ``aliases``:
    tied weights of these modules, with their first holder, under whose name they are saved.
    ``extra``: of the user. ``asked.keep`` finished checkpoints are kept, older ones of this ``run``
    are deleted. ``run``: what all lives of its ranks are called; empty: it has one life. ``wait``:
    waits for the other ranks before a failed write is raised.
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
        run: str = "",
    ) -> None:
        self._directory, self._asked, self._world = Path(asked.directory), asked, world
        self._run = run or uuid.uuid4().hex
        self._extra, self._wait_for = extra, wait
        self._group = world.control
        if asked.asynchronous:
            # Its collectives run in another thread, at any time between those of the control group.
            self._group = world.groups.new(backend="gloo", group_desc="pipemorph checkpoints")
        self._writing: tuple[Path, Future[Any]] | None = None
        self._unfinished: checkpoints.Unfinished | None = None
        """The folder of the checkpoint that is being written, on rank 0."""
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
        if world.coordinate.rank == 0:
            with _best_effort("delete unfinished checkpoints"):
                checkpoints.sweep(self._directory, self._run)

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

    def save(self, iteration: int, unreported: Sequence[IterationSample] = ()) -> Path:
        """Write a checkpoint to be resumed at ``iteration``; returns its folder. ``unreported``: on
        rank 0, iterations before it.

        An asynchronous one is copied to host memory here, and written by a thread: it counts as
        finished when all ranks have written it. Raises :class:`UnwrittenError` on all ranks if the
        disk of one of them refuses it, or refused the one before, and :class:`PipelineError` if it
        cannot be written for another reason.
        """
        self.finish()
        folder = self._make_folder(iteration)
        state = self._state() | {
            name: parameter.grad
            for name, parameter in self._gradients()
            if parameter.grad is not None and parameter.grad.count_nonzero()
        }
        state[_ITERATION] = torch.tensor(iteration)
        state[_STAGES] = torch.tensor(self._world.coordinate.stages if self._prefixed else 0)
        state[_SUMMED] = torch.tensor(1)
        if unreported:
            content = bytearray(_SAMPLES.dump_json(unreported))
            state[_UNREPORTED] = torch.frombuffer(content, dtype=torch.uint8)
        state |= self._extra.pack()
        writer = Writer(folder, self._unfinished)
        with self._ending_in(folder):
            if self._asked.asynchronous:
                written: Any = state_dict_saver.async_save(
                    state, storage_writer=writer, process_group=self._group
                )
                self._writing = folder, written
                return folder
            state_dict_saver.save(state, storage_writer=writer, process_group=self._group)
        self._finished()
        return folder

    def _make_folder(self, iteration: int) -> Path:
        """Make the folder, on rank 0. Raises :class:`UnwrittenError` on all ranks if that is not
        possible."""
        told = ("", "")
        if self._world.coordinate.rank == 0:
            try:
                self._unfinished = checkpoints.Unfinished(self._directory, iteration, self._run)
                told = (str(self._unfinished.folder), "")
            except OSError as error:
                told = ("", f"rank 0: {error.strerror}")
        folder, why = self._world.share(told, tuple[str, str])
        if why:
            raise UnwrittenError(
                f"the checkpoint of iteration {iteration} cannot be written to {self._directory}:"
                f" {why}"
            )
        return Path(folder)

    @contextmanager
    def _ending_in(self, folder: Path) -> Iterator[None]:
        """Name the folder, and the first rank that failed, in errors of writing it."""
        try:
            yield
        except (CheckpointException, RuntimeError) as error:
            self._close()
            kind, why = PipelineError, first_sentence(error)
            if isinstance(error, CheckpointException):
                why = _first_failure(error)
                if all(isinstance(each, OSError) for each, _ in error.failures.values()):
                    kind = UnwrittenError
            elif (gone := self._wait_for.who_is_gone()) is not None:
                raise PeerLostError(f"{folder} is not finished: {gone}") from error
            raise kind(f"{folder} cannot be written: {why}") from error

    def _close(self) -> None:
        """Nothing is being written any more, on this rank."""
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None:
            with _best_effort(f"delete {unfinished.folder}, which is not finished"):
                unfinished.close()

    def _finished(self) -> None:
        """All ranks have written the checkpoint."""
        self._close()
        if self._world.coordinate.rank == 0:
            with _best_effort("delete older checkpoints"):
                checkpoints.remove_old(self._directory, self._run, self._asked.keep)

    @property
    def writing(self) -> Path | None:
        """The folder of the checkpoint that is being written; None if there is none."""
        return None if self._writing is None else self._writing[0]

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is finished. Raises as :meth:`save`."""
        if self._writing is None:
            return
        (folder, written), self._writing = self._writing, None
        with self._ending_in(folder):
            try:
                written.result()
            except CheckpointException:
                self._meet(folder)
                raise
        self._finished()

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

    def newest(self) -> int:
        """The iteration of the newest checkpoint of this run that looks whole; 0 without one."""
        found = checkpoints.to_resume(self._directory, self._run)
        return next((e.iteration for e in found if e.is_of(self._run) and not e.damage), 0)

    def resume(self) -> Resumed:
        """Load the newest checkpoint that is not damaged.

        Raises :class:`InputError` if all are damaged, or if the newest that is not does not fit
        the module, the optimizer, ``state=`` or the number of stages.
        """
        known: list[Path] = []
        if self._world.coordinate.rank == 0:
            known = [e.folder for e in checkpoints.to_resume(self._directory, self._run)]
        skipped: list[tuple[Path, str]] = []
        for folder in self._world.share(known, list[Path]):
            loaded = self._load(folder)
            if isinstance(loaded, Resumed):
                return loaded._replace(why=checkpoints.named(skipped))
            skipped.append((folder, loaded))
            if self._world.coordinate.rank == 0:
                log.warning("checkpoints: %s", checkpoints.named(skipped[-1:]))
        if skipped:
            raise InputError(
                f"no checkpoint in {self._directory} can be used: {checkpoints.named(skipped)};"
                " mend or move them, or begin anew with checkpoint.resume: false"
            )
        return Resumed(0, "beginning")

    def _load(self, folder: Path) -> Resumed | str:
        """Load a checkpoint. Returns what was found, or how it is damaged, the same on all ranks.
        Raises :class:`InputError` on all ranks if it does not fit."""
        saved, why = self._examine(folder)
        if why := self._first(why):
            return why
        try:
            marks: dict[str, Any] = {_ITERATION: torch.tensor(0), _STAGES: torch.tensor(0)}
            self._read(marks, folder)
            stages = int(marks[_STAGES])
            if stages not in (0, self._world.coordinate.stages):
                raise InputError(
                    f"{folder} was saved by {stages} stages that share parameter names; resume with"
                    f" {stages} stages, not {self._world.coordinate.stages}"
                )
            gradients = [(name, p) for name, p in self._gradients() if name in saved]
            state = self._state() | {name: zero_grad(p) for name, p in gradients}
            moments = [k for name, k in self._keys.items() if name.startswith("optimizer.state.")]
            stepped = not moments or any(name in saved for name in moments)
            if not stepped:
                # Saved before the optimizer's first step: those that `_state` made count one too
                # many.
                for name in {*moments}:
                    del state[name]
            packed = self._extra.chosen(saved)
            if self._world.coordinate.rank == 0 and _UNREPORTED in saved:
                packed[_UNREPORTED] = torch.empty(saved[_UNREPORTED].size, dtype=torch.uint8)
            if misfit := self._misfit(state, saved):
                raise InputError(f"{folder} does not fit this job: {misfit}")
            self._read(whole := {**state, **packed}, folder)
        except CheckpointException as error:
            return f"it cannot be loaded: {_first_failure(error)}"
        self._restore(whole, stepped=stepped)
        for parameter, grad in _of_each([(p, name) for name, p in gradients], whole):
            parameter.grad = grad
        content = whole.pop(_UNREPORTED, None)
        self._extra.unpack({key: whole[key] for key in packed if key in whole})
        seen = checkpoints.read(folder)
        unreported: Sequence[IterationSample] = ()
        if content is not None and seen is not None and seen.is_of(self._run):
            unreported = _SAMPLES.validate_json(content.numpy().tobytes())
        return Resumed(int(marks[_ITERATION]), "checkpoint", unreported=unreported)

    def _read(self, state: dict[str, Any], folder: Path) -> None:
        state_dict_loader.load(state, checkpoint_id=folder, process_group=self._world.control)

    def _first(self, why: str) -> str:
        """The reason of the first rank that has one, the same on all."""
        told = self._world.tell_all(why, str)
        return next((f"rank {rank}: {each}" for rank, each in enumerate(told) if each), "")

    def _examine(self, folder: Path) -> tuple[Mapping[str, Any], str]:
        """What a checkpoint holds, by name, and how it is damaged as far as this rank sees."""
        seen = checkpoints.read(folder)
        if seen is None:
            return {}, "it is gone"
        manifest = seen.manifest
        if seen.damage:
            return {}, seen.damage
        if manifest is not None:
            control = self._world.control
            why = damage(folder, manifest, dist.get_rank(control), dist.get_world_size(control))
            if why:
                return {}, why
        try:
            saved = FileSystemReader(folder).read_metadata().state_dict_metadata
        except Exception as error:  # noqa: BLE001  Unpickling damaged bytes raises anything.
            return {}, f"{checkpoints.FINISHED}: {first_sentence(error)}"
        if manifest is None and _SUMMED in saved:
            return {}, f"its {checkpoints.MANIFEST} is missing"
        if manifest is None and self._world.coordinate.rank == 0:
            log.warning("%s has no checksums: it is loaded as it is", folder)
        return saved, ""

    def _misfit(self, state: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
        """Why a checkpoint does not fit the job, the same on all ranks; empty if it does."""
        lacking = sorted(name for name in state if name not in saved)
        why = f"the checkpoint lacks {_some(lacking)}" if lacking else ""
        for name, value in () if why else state.items():
            size = getattr(saved[name], "size", None)
            if isinstance(value, Tensor) and size is not None and size != value.shape:
                why = f"{name} has the shape {[*value.shape]}, and had {[*size]}"
                break
        if why := self._first(why):
            return why
        names = sorted(saved)
        taken = torch.tensor([name in state for name in names], dtype=torch.uint8)
        dist.all_reduce(taken, dist.ReduceOp.MAX, group=self._world.control)
        left = [name for name, some in zip(names, taken.tolist(), strict=True) if not some]
        # What ranks of another mesh saved beside the model is theirs.
        if left := [name for name in left if not name.startswith(("pipemorph.", "emulated."))]:
            return f"no rank takes {_some(left)}"
        before = self._extra.saved_names(saved)
        now = {n for each in self._world.tell_all(self._extra.names, list[str]) for n in each}
        if only := before - now:
            return f"no rank has state[{min(only)!r}]"
        return f"the checkpoint lacks state[{min(only)!r}]" if (only := now - before) else ""

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
def _best_effort(what: str) -> Iterator[None]:
    """Warn if the disk does not allow what no checkpoint depends on."""
    try:
        yield
    except OSError as error:
        log.warning("checkpoints: cannot %s: %s", what, error)


def _first_failure(error: CheckpointException) -> str:
    rank, (why, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {first_sentence(why)}"


def _some(names: Collection[str]) -> str:
    more = len(names) - 1
    return min(names) + (f" and {more} more" if more else "")
