"""Checkpoints of a pipeline on disk, in the format of ``torch.distributed.checkpoint``.

Each stage saves its parameters under their names in the module. If these names are unique over all
stages (layers are numbered over the whole model), a checkpoint can be resumed with another number
of stages. Otherwise (``nn.Sequential`` numbers each stage from 0) keys get the stage as a prefix,
and the number of stages must stay.

Each rank also saves the objects that the user added, and its random state (:mod:`.user_state`).

During gradient accumulation ``.grad`` is state as well. Gradients that are not zero are saved, so
that a resumed run adds to them as an uninterrupted run does.

Each checkpoint has a folder, see :mod:`pipemorph.checkpoints`. torch writes ``.metadata`` last, so
a folder without it is unfinished. All files are compared with their checksums before any is loaded;
if one is damaged, the next older checkpoint is tried.
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
from pipemorph.errors import InputError
from pipemorph.protocol import IterationSample
from pipemorph.spec.sections.trainer import Checkpoint
from pipemorph_trainer.backward.gradient_form import grad_dtype, make_zero_grad
from pipemorph_trainer.checkpoint.checked_files import CheckpointWriter, find_damage
from pipemorph_trainer.checkpoint.memory.resume_point import ResumePoint
from pipemorph_trainer.checkpoint.user_state import UserState
from pipemorph_trainer.checkpoint.value_names import NamesByStage, find_name_clash, list_own_names
from pipemorph_trainer.errors import (
    PeerLostError,
    PipelineError,
    UnwrittenError,
    first_sentence,
)
from pipemorph_trainer.executor.emulated_stage import EmulatedRunner
from pipemorph_trainer.executor.waiting import CollectiveWaiter
from pipemorph_trainer.sync.tied_weights import Holder
from pipemorph_trainer.topology.groups import gather_values
from pipemorph_trainer.topology.world import World

log = logging.getLogger("pipemorph.trainer")

_SAMPLES: TypeAdapter[Sequence[IterationSample]] = TypeAdapter(list[IterationSample])
T = TypeVar("T")
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_ITERATION = "pipemorph.iteration"
_STAGES = "pipemorph.stages"
_UNREPORTED = "pipemorph.unreported"
"""Earlier iterations that rank 0 may not have reported to the host of the run: JSON."""
_HAS_CHECKSUMS = "pipemorph.summed"
"""Key of a checkpoint with checksums: without its manifest, it is damaged and not merely old."""
_KINDS = ("model.", "gradient.", "optimizer.state.", "optimizer.param_groups.")
"""Prefixes of the names of values."""


class DiskCheckpointer:
    """Saves and resumes one pipeline. Every call is collective over all ranks.

    ``spec``: checkpoint section of the job spec; the newest ``spec.keep`` finished checkpoints of
    this ``run`` stay. ``stages``: modules of this rank's stages, or runners of emulated ones.
    ``aliases``: tied weights of these modules, with the first holder, whose name they get.
    ``extra``: objects of the user. ``run``: name shared by all restarts of the job; empty if it is
    never restarted. ``wait``: waits for the other ranks before a failed write is raised.
    """

    def __init__(
        self,
        spec: Checkpoint,
        world: World,
        stages: Mapping[int, nn.Module | EmulatedRunner],
        optimizer: torch.optim.Optimizer | None,
        *,
        aliases: Mapping[Holder, Holder],
        extra: UserState,
        wait: CollectiveWaiter,
        run: str = "",
    ) -> None:
        self._directory, self._spec, self._world = Path(spec.directory), spec, world
        self._run = run or uuid.uuid4().hex
        self._extra, self._wait_for = extra, wait
        self._group = world.control
        if spec.asynchronous:
            # An asynchronous save runs collectives in another thread, at any time.
            self._group = world.groups.create_group(
                backend="gloo", group_desc="pipemorph checkpoints"
            )
        self._writing: tuple[Path, Future[Any]] | None = None
        self._unfinished: checkpoints.UnfinishedCheckpoint | None = None
        """Folder of the checkpoint that is being written, on rank 0."""
        self._modules = {s: each for s, each in stages.items() if isinstance(each, nn.Module)}
        self._emulated = {s: each for s, each in stages.items() if isinstance(each, EmulatedRunner)}
        # The stage is a prefix of each name: one optimizer may have the parameters of all stages.
        self._module = nn.ModuleDict({str(stage): m for stage, m in self._modules.items()})
        self._optimizer = optimizer
        self._aliases = aliases
        self._keys: dict[str, str] = {}
        """Key in a checkpoint, by the name of each value of this rank."""
        self._prefixed = bool(self._modules) and self._stages_share_names()
        """True if keys get the stage as a prefix."""
        if world.coordinate.rank == 0:
            with _warn_on_failure("delete unfinished checkpoints"):
                checkpoints.delete_unfinished(self._directory, self._run)

    def _stages_share_names(self) -> bool:
        """True if two stages of the pipeline have a tensor of the same name."""
        own = list_own_names(self._modules, self._aliases)
        stages = self._world.get_group(("pp",))
        found = find_name_clash(
            [own] if stages is None else gather_values(own, NamesByStage, stages)
        )
        if found is not None and self._world.coordinate.rank == 0:
            log.warning(
                "checkpoints: %s; names get the stage as a prefix, so these checkpoints resume with"
                " %d stages only", found, self._world.coordinate.stages,
            )  # fmt: skip
        return found is not None

    def save(self, iteration: int, unreported: Sequence[IterationSample] = ()) -> Path:
        """Write a checkpoint from which ``iteration`` can begin; return its folder. ``unreported``:
        on rank 0, earlier iterations that the host may not have.

        An asynchronous checkpoint is copied to host memory here and written by a thread. It is
        finished when all ranks have written it. Raises :class:`UnwrittenError` on all ranks if the
        disk of one refuses this checkpoint or refused the previous one, and :class:`PipelineError`
        if another reason prevents it.
        """
        self.finish_writing()
        folder = self._create_folder(iteration)
        state = self._collect_state() | {
            name: parameter.grad
            for name, parameter in self._list_gradients()
            if parameter.grad is not None and parameter.grad.count_nonzero()
        }
        state[_ITERATION] = torch.tensor(iteration)
        state[_STAGES] = torch.tensor(self._world.coordinate.stages if self._prefixed else 0)
        state[_HAS_CHECKSUMS] = torch.tensor(1)
        if unreported:
            content = bytearray(_SAMPLES.dump_json(unreported))
            state[_UNREPORTED] = torch.frombuffer(content, dtype=torch.uint8)
        state |= self._extra.pack_tensors()
        writer = CheckpointWriter(folder, self._unfinished)
        with self._name_folder_in_errors(folder):
            if self._spec.asynchronous:
                written: Any = state_dict_saver.async_save(
                    state, storage_writer=writer, process_group=self._group
                )
                self._writing = folder, written
                return folder
            state_dict_saver.save(state, storage_writer=writer, process_group=self._group)
        self._complete_save()
        return folder

    def _create_folder(self, iteration: int) -> Path:
        """Make the folder, on rank 0. Raises :class:`UnwrittenError` on all ranks if rank 0
        cannot."""
        result = ("", "")
        if self._world.coordinate.rank == 0:
            try:
                self._unfinished = checkpoints.UnfinishedCheckpoint(
                    self._directory, iteration, self._run
                )
                result = (str(self._unfinished.folder), "")
            except OSError as error:
                result = ("", f"rank 0: {error.strerror}")
        folder, why = self._world.broadcast_value(result, tuple[str, str])
        if why:
            raise UnwrittenError(
                f"the checkpoint of iteration {iteration} cannot be written to {self._directory}:"
                f" {why}"
            )
        return Path(folder)

    @contextmanager
    def _name_folder_in_errors(self, folder: Path) -> Iterator[None]:
        """Name the folder and the first failed rank in errors of writing."""
        try:
            yield
        except (CheckpointException, RuntimeError) as error:
            self._close_folder()
            kind, why = PipelineError, first_sentence(error)
            if isinstance(error, CheckpointException):
                why = _describe_first_failure(error)
                if all(isinstance(each, OSError) for each, _ in error.failures.values()):
                    kind = UnwrittenError
            elif (gone := self._wait_for.find_lost_peer()) is not None:
                raise PeerLostError(f"{folder} is not finished: {gone}") from error
            raise kind(f"{folder} cannot be written: {why}") from error

    def _close_folder(self) -> None:
        """End writing on this rank."""
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None:
            with _warn_on_failure(f"delete {unfinished.folder}, which is not finished"):
                unfinished.close()

    def _complete_save(self) -> None:
        """Complete a checkpoint that all ranks have written."""
        self._close_folder()
        if self._world.coordinate.rank == 0:
            with _warn_on_failure("delete older checkpoints"):
                checkpoints.delete_old(self._directory, self._run, self._spec.keep)

    @property
    def folder_being_written(self) -> Path | None:
        """Folder of the checkpoint that is being written; None if there is none."""
        return None if self._writing is None else self._writing[0]

    def finish_writing(self) -> None:
        """Wait until the checkpoint that is being written is finished. Raises as :meth:`save`."""
        if self._writing is None:
            return
        (folder, written), self._writing = self._writing, None
        with self._name_folder_in_errors(folder):
            try:
                written.result()
            except CheckpointException:
                self._await_failure_on_all(folder)
                raise
        self._complete_save()

    def _await_failure_on_all(self, folder: Path) -> None:
        """Wait until all ranks have found that a checkpoint cannot be written. Each finds it at the
        same point between two iterations. If this rank closed its connections before the others
        are there, they would fail within an iteration, with a lost peer as the cause."""
        work = dist.barrier(self._world.control, async_op=True)
        try:
            self._wait_for(work, f"all ranks to find that {folder} cannot be written")
        except PipelineError as error:
            # The caller raises the cause of the failed write, even if a peer is lost as well.
            log.warning("%s", error)

    def find_newest_iteration(self) -> int:
        """Find the iteration of this run's newest checkpoint that looks whole; 0 if none does."""
        found = checkpoints.list_resumable(self._directory, self._run)
        return next((e.iteration for e in found if e.written_by(self._run) and not e.damage), 0)

    def resume(self) -> ResumePoint:
        """Load the newest undamaged checkpoint.

        Raises :class:`InputError` if all are damaged, or if the newest undamaged one does not fit
        the module, the optimizer, ``state=`` or the number of stages.
        """
        known: list[Path] = []
        if self._world.coordinate.rank == 0:
            known = [e.folder for e in checkpoints.list_resumable(self._directory, self._run)]
        skipped: list[tuple[Path, str]] = []
        for folder in self._world.broadcast_value(known, list[Path]):
            loaded = self._load_folder(folder)
            if isinstance(loaded, ResumePoint):
                return loaded._replace(why=checkpoints.describe_skipped(skipped))
            skipped.append((folder, loaded))
            if self._world.coordinate.rank == 0:
                log.warning("checkpoints: %s", checkpoints.describe_skipped(skipped[-1:]))
        if skipped:
            raise InputError(
                f"no checkpoint in {self._directory} can be used:"
                f" {checkpoints.describe_skipped(skipped)}; repair or move them, or start anew"
                " with checkpoint.resume: false"
            )
        return ResumePoint(0, "beginning")

    def _load_folder(self, folder: Path) -> ResumePoint | str:
        """Load a checkpoint. Returns the iteration to resume, or a description of the damage, the
        same on all ranks. Raises :class:`InputError` on all ranks if the checkpoint does not
        fit."""
        saved, why = self._examine_folder(folder)
        if why := self._find_first_reason(why):
            return why
        try:
            marks: dict[str, Any] = {_ITERATION: torch.tensor(0), _STAGES: torch.tensor(0)}
            self._read_values(marks, folder)
            stages = int(marks[_STAGES])
            if stages not in (0, self._world.coordinate.stages):
                raise InputError(
                    f"{folder} was saved by {stages} stages that share parameter names; resume with"
                    f" {stages} stages, not {self._world.coordinate.stages}"
                )
            gradients = [(name, p) for name, p in self._list_gradients() if name in saved]
            state = self._collect_state() | {name: make_zero_grad(p) for name, p in gradients}
            moments = [k for name, k in self._keys.items() if name.startswith("optimizer.state.")]
            stepped = not moments or any(name in saved for name in moments)
            if not stepped:
                # Saved before the optimizer's first step: the moments that `_collect_state` created
                # count a step that was never made.
                for name in {*moments}:
                    del state[name]
            packed = self._extra.select_saved(saved)
            if self._world.coordinate.rank == 0 and _UNREPORTED in saved:
                packed[_UNREPORTED] = torch.empty(saved[_UNREPORTED].size, dtype=torch.uint8)
            if misfit := self._find_misfit(state, saved):
                raise InputError(f"{folder} does not fit this job: {misfit}")
            self._read_values(whole := {**state, **packed}, folder)
        except CheckpointException as error:
            return f"it cannot be loaded: {_describe_first_failure(error)}"
        self._restore_state(whole, stepped=stepped)
        for parameter, grad in _iterate_loaded_values([(p, name) for name, p in gradients], whole):
            parameter.grad = grad
        content = whole.pop(_UNREPORTED, None)
        self._extra.unpack_tensors({key: whole[key] for key in packed if key in whole})
        seen = checkpoints.read_checkpoint(folder)
        unreported: Sequence[IterationSample] = ()
        if content is not None and seen is not None and seen.written_by(self._run):
            unreported = _SAMPLES.validate_json(content.numpy().tobytes())
        return ResumePoint(int(marks[_ITERATION]), "checkpoint", unreported=unreported)

    def _read_values(self, state: dict[str, Any], folder: Path) -> None:
        state_dict_loader.load(state, checkpoint_id=folder, process_group=self._world.control)

    def _find_first_reason(self, why: str) -> str:
        """Find the reason of the first rank that has one, the same on all ranks; else empty."""
        reasons = self._world.gather_all(why, str)
        return next((f"rank {rank}: {each}" for rank, each in enumerate(reasons) if each), "")

    def _examine_folder(self, folder: Path) -> tuple[Mapping[str, Any], str]:
        """Read a checkpoint's metadata, by key, and find the damage that this rank can see."""
        seen = checkpoints.read_checkpoint(folder)
        if seen is None:
            return {}, "it is gone"
        manifest = seen.manifest
        if seen.damage:
            return {}, seen.damage
        if manifest is not None:
            control = self._world.control
            why = find_damage(
                folder, manifest, dist.get_rank(control), dist.get_world_size(control)
            )
            if why:
                return {}, why
        try:
            saved = FileSystemReader(folder).read_metadata().state_dict_metadata
        except Exception as error:  # noqa: BLE001  Unpickling damaged bytes can raise anything.
            return {}, f"{checkpoints.FINISHED}: {first_sentence(error)}"
        if manifest is None and _HAS_CHECKSUMS in saved:
            return {}, f"its {checkpoints.MANIFEST} is missing"
        if manifest is None and self._world.coordinate.rank == 0:
            log.warning("%s has no checksums: it is loaded unchecked", folder)
        return saved, ""

    def _find_misfit(self, state: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
        """Explain why a checkpoint does not fit the job, the same on all ranks; empty if it
        fits."""
        lacking = sorted(name for name in state if name not in saved)
        why = f"the checkpoint lacks {_shorten_names(lacking)}" if lacking else ""
        for name, value in () if why else state.items():
            size = getattr(saved[name], "size", None)
            if isinstance(value, Tensor) and size is not None and size != value.shape:
                why = f"{name} has the shape {[*value.shape]}, the saved one {[*size]}"
                break
        if why := self._find_first_reason(why):
            return why
        names = sorted(saved)
        taken = torch.tensor([name in state for name in names], dtype=torch.uint8)
        dist.all_reduce(taken, dist.ReduceOp.MAX, group=self._world.control)
        unused = [name for name, some in zip(names, taken.tolist(), strict=True) if not some]
        # Ranks of another mesh may have saved more than the model for themselves.
        if unused := [n for n in unused if not n.startswith(("pipemorph.", "emulated."))]:
            return f"no rank takes {_shorten_names(unused)}"
        before = self._extra.list_saved_names(saved)
        now = {n for each in self._world.gather_all(self._extra.names, list[str]) for n in each}
        if only := before - now:
            return f"no rank has state[{min(only)!r}]"
        return f"the checkpoint lacks state[{min(only)!r}]" if (only := now - before) else ""

    def _collect_state(self) -> dict[str, Any]:
        """Collect modules and optimizer state, by key in a checkpoint; sets :attr:`_keys`."""
        if self._emulated:
            return {
                self._make_emulated_key(stage): torch.tensor(
                    list(runner.read_state().to_bytes(8, "little"))
                )
                for stage, runner in self._emulated.items()
            }
        state = {
            f"model.{name}": value
            for name, value in get_model_state_dict(self._module, options=_OPTIONS).items()
        }
        if self._optimizer is not None:
            with _with_optimizer_state(self._optimizer):
                found: Any = get_optimizer_state_dict(
                    self._module, self._optimizer, options=_OPTIONS
                )
            state |= {f"optimizer.{name}": v for name, v in found.items()}
        self._keys = {name: self._make_key(name) for name in state}
        return {self._keys[name]: value for name, value in state.items()}

    def _make_emulated_key(self, stage: int) -> str:
        return f"emulated.replica{self._world.coordinate.column}.stage{stage}"

    def _make_key(self, name: str) -> str:
        """Return the key of a value in a checkpoint.

        ``name``: ``model.`` or ``gradient.``, a stage and a parameter; or ``optimizer.state.`` or
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

    def _list_gradients(self) -> list[tuple[str, nn.Parameter]]:
        """List parameters with the keys of their gradients in a checkpoint. Two holders of a tied
        weight share a key."""
        return [
            (self._make_key(f"gradient.{name.replace('_orig_mod.', '')}"), parameter)
            for name, parameter in self._module.named_parameters()
            if parameter.requires_grad
        ]

    def _restore_state(self, state: dict[str, Any], *, stepped: bool) -> None:
        """Load values by key. ``stepped``: they include the optimizer's state."""
        for stage, runner in self._emulated.items():
            value = state[self._make_emulated_key(stage)]
            runner.restore_state(int.from_bytes(bytes(value.tolist()), "little"))
        if not self._modules:
            return

        def select_kind(kind: str) -> dict[str, Any]:
            start = f"{kind}."
            mine = [
                (name.removeprefix(start), key)
                for name, key in self._keys.items()
                if name.startswith(start) and key in state
            ]
            return dict(_iterate_loaded_values(mine, state))

        set_model_state_dict(self._module, select_kind("model"), options=_OPTIONS)
        if self._optimizer is None:
            return
        if not stepped:
            self._optimizer.state.clear()
        else:
            loaded = select_kind("optimizer")
            with _with_optimizer_state(self._optimizer):
                set_optimizer_state_dict(self._module, self._optimizer, loaded, options=_OPTIONS)
            self._restore_dtypes(loaded)

    def _restore_dtypes(self, loaded: Mapping[str, Any]) -> None:
        """Restore the dtypes of the optimizer's state: torch casts a loaded state to the dtype of
        its parameter, for example the float32 momentum of a bfloat16 parameter."""
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


def _iterate_loaded_values(
    holders: Iterable[tuple[T, str]], state: Mapping[str, Any]
) -> Iterator[tuple[T, Any]]:
    """Yield the loaded value of each holder by its key. If two stages of this rank hold a tied
    weight, the second gets a copy: each writes to its own gradient and optimizer state."""
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
def _with_optimizer_state(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context in which an optimizer that has not stepped has state, so that torch creates none.

    torch would create it by a step with learning rate 0 on zero gradients of the parameters' dtype.
    Parameters whose gradients have another dtype refuse those.
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
        _assign_zero_gradients(parameters)
        for group, rate in rates:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        optimizer.step()
        # Again, since hooks of the step may remove them. If there are gradients, torch skips an
        # optimizer without state, such as SGD.
        _assign_zero_gradients(parameters)
        for group, rate in rates:
            group["lr"] = rate
        yield
    finally:
        for group, rate in rates:
            group["lr"] = rate
        for parameter in parameters:
            parameter.grad = None


def _assign_zero_gradients(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = make_zero_grad(parameter)


@contextmanager
def _warn_on_failure(what: str) -> Iterator[None]:
    """Warn if the disk refuses an operation that no checkpoint depends on."""
    try:
        yield
    except OSError as error:
        log.warning("checkpoints: cannot %s: %s", what, error)


def _describe_first_failure(error: CheckpointException) -> str:
    rank, (why, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {first_sentence(why)}"


def _shorten_names(names: Collection[str]) -> str:
    more = len(names) - 1
    return min(names) + (f" and {more} more" if more else "")
