"""Messages of ranks before training begins: refusals, other weights, tied matrices."""

from __future__ import annotations

import inspect
import logging
import re
import resource
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gate import same_bits
from launch import Ranks, run_ranks
from manifests import job_of
from pydantic import TypeAdapter, ValidationError
from split_support import Lambda
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate

from pipemorph.errors import InputError
from pipemorph.planning import Policy
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.mesh import MeshShape
from pipemorph.spec.sections.faults import Fault
from pipemorph.spec.sections.trainer import Checkpoint
from pipemorph_trainer import EmulatedStage, Options, Pipeline, TrainerContext
from pipemorph_trainer.errors import PipelineError, SplitError
from pipemorph_trainer.executor.module_runner import ModuleRunner
from pipemorph_trainer.schedule.rank_preparation import (
    RankPreparation,
    check_stage_module,
    prepare_rank,
)
from pipemorph_trainer.settings import MANIFEST_FIELDS, SCRIPT_SETTINGS, Settings
from pipemorph_trainer.startup import StartupInfo, check_startup_info, list_warnings
from pipemorph_trainer.sync.fingerprints import (
    Dtype,
    compute_fingerprint,
    describe_tensors,
)
from pipemorph_trainer.sync.tied_weights import Holder, TiedForms
from pipemorph_trainer.topology.groups import gather_values
from pipemorph_trainer.topology.mesh import join_process_group
from pipemorph_trainer.torch import AdaptiveSchedule

State = dict[str, Tensor]


def start_of(module: nn.Module, stages: int = 2, replicas: int = 2, stage: int = 0) -> StartupInfo:
    mesh = MeshShape(stages, replicas, order=("dp_replicate", "pp"))
    place = mesh.find_coordinate(mesh.find_rank(stage, 0))
    return StartupInfo(mesh=mesh, microbatches=4, tensors=describe_tensors(module, place))


def linear(seed: int, width: int = 4) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(width, width)


def test_a_fingerprint_tells_any_bit() -> None:
    base = torch.arange(200_000, dtype=torch.int32).reshape(2, -1)
    seen = {compute_fingerprint(base)}
    for place in (0, 1, 65_536, 131_072, 199_999):
        other = base.clone()
        other.view(-1)[place] ^= -(1 << 31)
        seen.add(compute_fingerprint(other))
    # Two flipped signs, and the same elements in another order.
    signs = base.clone()
    signs[:, 1] ^= -(1 << 31)
    seen |= {
        compute_fingerprint(signs),
        compute_fingerprint(base.flip(0)),
        compute_fingerprint(torch.zeros_like(base)),
    }
    assert len(seen) == 9
    assert compute_fingerprint(base.clone().t().contiguous().t()) == compute_fingerprint(base), (
        "strides"
    )
    for odd in (torch.ones(()), torch.ones(3, dtype=torch.bool), torch.ones(7).to(torch.bfloat16)):
        assert (
            compute_fingerprint(odd)
            == compute_fingerprint(odd.clone())
            != compute_fingerprint(odd * 0)
        )
    shifted = torch.arange(9, dtype=torch.uint8)[1:]
    assert compute_fingerprint(shifted) == compute_fingerprint(shifted.clone())
    assert compute_fingerprint(torch.ones(0)) == 0


def test_replicas_that_differ_are_reported_in_one_line() -> None:
    same = [start_of(linear(stage)) for stage in (0, 1)]
    other = nn.Sequential(linear(0), linear(1), nn.BatchNorm1d(4))
    wider = linear(0)
    wider.weight.grad_dtype = torch.float64
    starts = [*same, same[0], start_of(linear(7))]
    check_startup_info(starts)
    (line,) = list_warnings(starts)
    assert line.startswith(
        "replicas began with different values: rank 3 (stage 1, replica 1) in 2 of 2 tensors "
        "('weight', 'bias'); all now have those of replica 0."
    )
    (line,) = list_warnings([*same, start_of(linear(8)), start_of(linear(7))])
    assert (
        "rank 2 (stage 0, replica 1) in 2 of 2" in line and ", and 1 other rank likewise;" in line
    )
    assert not list(list_warnings([*same, *same]))
    for module, error in (
        (linear(0, 8), "parameter 'weight' as float32[8, 8], and rank 0 (stage 0, replica 0) as"
         " float32[4, 4]"),
        (linear(0).double(), "parameter 'weight' as float64[4, 4]"),
        (linear(0).requires_grad_(False), "as float32[4, 4], frozen, and"),
        (wider, "as float32[4, 4], gradients in float64, and"),
        (nn.Linear(4, 4, bias=False), "no parameter 'bias', which rank 0 (stage 0, replica 0) has"
         " (float32[4])"),
        (other, "parameter '0.weight' (float32[4, 4]), which rank 0"),
    ):  # fmt: skip
        with pytest.raises(InputError) as refused:
            check_startup_info([*same, start_of(module), same[1]])
        line = str(refused.value)
        assert line.startswith("rank 2 (stage 0, replica 1) has ") and error in line
        assert "\n" not in line


def test_ranks_with_different_layers_start_again() -> None:
    """Ranks get the same layers then, so it is no fault of what they were given."""
    mine = StartupInfo(mesh=MeshShape(2), microbatches=4, split=(4, 2))
    check_startup_info([mine, mine])
    with pytest.raises(PipelineError) as refused:
        check_startup_info([mine, replace(mine, split=())])
    assert str(refused.value) == (
        "rank 1 was started with evenly many layers per stage and rank 0 with 4, 2"
        " layers; the ranks have to start again, all with the same"
    )


def test_what_a_rank_was_given_is_what_it_tells() -> None:
    context = TrainerContext(0, 2, 0, "127.0.0.1", 1, layers="[4, 2]")
    ready, start = prepared(linear(0), context=context)
    assert ready is not None and start.split == (4, 2), start.refusal


def test_one_matrix_on_two_stages_is_reported() -> None:
    """A tied embedding that each stage built for itself, from one seed."""

    def stage(seed: int, tied: bool) -> nn.Module:
        torch.manual_seed(9)
        module = nn.ModuleDict({"embedding": nn.Embedding(11, 4)}) if tied else nn.ModuleDict()
        module["block"] = linear(seed)
        module["norm"] = nn.LayerNorm(4)
        module["adapter"] = nn.Linear(4, 4)
        nn.init.zeros_(module["adapter"].weight)  # type: ignore[arg-type]
        return module

    starts = [start_of(stage(i, tied=i != 1), stages=3, stage=i) for i in range(3)]
    (line,) = list_warnings(starts)
    assert line.startswith(
        "'embedding.weight' of stage 0 and 'embedding.weight' of stage 2 begin with the same values"
    )
    assert not list(
        list_warnings([start_of(stage(i, i == 0), stages=3, stage=i) for i in range(3)])
    )
    alike = [start_of(stage(0, tied=True), stages=3, stage=i) for i in range(3)]
    (line,) = list_warnings(alike)
    assert "(and 3 other pairs)" in line, "no line for each"


def test_ranks_that_differ_in_what_all_share_are_named() -> None:
    mine = start_of(linear(0), stages=1)
    with pytest.raises(
        InputError, match="rank 1 was given microbatches=8 and rank 0 microbatches=4"
    ):
        check_startup_info([mine, replace(mine, microbatches=8)])
    with pytest.raises(InputError, match="rank 1 was given reorder=sums and rank 0 reorder=bits"):
        check_startup_info([replace(mine, reorder="bits"), replace(mine, reorder="sums")])
    refusing = StartupInfo(refusal="no room")
    with pytest.raises(InputError, match=r"^rank 1: no room$"):
        check_startup_info([mine, refusing])
    with pytest.raises(InputError, match=r"^rank 1: no room \(1 other rank cannot start either\)$"):
        check_startup_info([mine, refusing, StartupInfo(refusal="no time")])
    with pytest.raises(InputError, match=r"^no room$"):
        check_startup_info([refusing, refusing])


def test_a_stage_that_shares_out_its_own_work_is_refused() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = nn.Sequential(linear(0))
        fully_shard(sharded, mesh=mesh)
        check_stage_module(sharded)
        whole = DTensor.from_local(torch.ones(2, 4), mesh, [Replicate()])
        for stage, error in (
            (nn.Identity(), "output of the stage is a DTensor; return this rank's part"),
            (nn.Module(), "the last stage returned a DTensor; return loss.full_tensor()"),
        ):
            is_last = not isinstance(stage, nn.Identity)
            stage.forward = lambda x: whole.sum() if x is None else whole
            runner = ModuleRunner(stage, is_first=True, is_last=is_last, microbatches=1)
            with pytest.raises(SplitError) as wrong:
                runner.run_forward(0, [None if is_last else torch.ones(2, 4)])
            assert error in str(wrong.value)
        cases: list[tuple[Any, str]] = [
            (nn.parallel.DistributedDataParallel(linear(0)), "the stage is wrapped in Distributed"),
            (
                nn.Sequential(nn.parallel.DistributedDataParallel(linear(0))),
                "module '0' of the stage is wrapped in DistributedDataParallel; give Pipeline the "
                "module in it (.module)",
            ),
            (
                PipelineStage(linear(0), 0, 1, torch.device("cpu")),
                "the stage is a PipelineStage of torch.distributed.pipelining; give Pipeline the "
                "module in it (stage.submod)",
            ),
            (nn.LazyLinear(4), "parameter 'weight' of the stage has no shape yet; run the lazy"),
            ("model", "the stage is a str; expected an nn.Module or an EmulatedStage"),
        ]
        for stage, error in cases:
            with pytest.raises(InputError) as refused:
                check_stage_module(stage)
            assert error in str(refused.value) and "\n" not in str(refused.value)
    finally:
        dist.destroy_process_group()
    check_stage_module(linear(0))


def job(iterations: int = 2, **spec: Any) -> PipeMorphJob:
    base: dict[str, Any] = {
        "parallelism": {"stages": 1},
        "schedule": {"microbatches": 4},
        "trainer": {"module": "train", "iterations": iterations},
    }
    return job_of(base | spec)


def context_of(job: PipeMorphJob | None, world_size: int = 1) -> TrainerContext:
    return TrainerContext(0, world_size, 0, "127.0.0.1", 1, job=job)


def test_arguments_that_the_manifest_contradicts_are_errors() -> None:
    checkpoint = {"directory": "/x", "every": 2}
    two = {"parallelism": {"stages": 2}, "faults": [{"link": 0, "delayMs": 5}]}
    context = context_of(job(checkpoint=checkpoint, **two))
    same: dict[str, Any] = {
        "microbatches": 4, "stages": 2, "policy": Policy.PIPEMORPH, "route": None,
        "faults": (Fault(link=0, delay_ms=5),), "checkpoint": Checkpoint(directory="/x", every=2),
    }  # fmt: skip
    assert Settings.from_arguments(context, same) == Settings.from_arguments(context, {})
    for given, error in (
        (
            {"microbatches": 2},
            "microbatches=2, and the manifest says spec.schedule.microbatches: 4",
        ),
        (
            {"policy": Policy.GPIPE},
            "policy=gpipe, and the manifest says spec.schedule.policy: pipe",
        ),
        ({"faults": ()}, "faults=(), and the manifest says spec.faults: [Fault(link=0"),
        (
            {"host_memory": 1},
            "host_memory=1, and the manifest says spec.adaptation.hostMemory: None",
        ),
        (
            {"reorder": "sums"},
            "reorder=sums, and the manifest says spec.adaptation.reorder: bits",
        ),
        (
            {"checkpoint": Checkpoint(directory="/y", every=2)},
            "says spec.checkpoint: directory='/x'",
        ),
    ):
        with pytest.raises(InputError, match="leave the argument out") as refused:
            Settings.from_arguments(context, given)
        assert error in str(refused.value), refused.value
    names = {field.name for field in fields(Settings)}
    of_mesh = {"stages", "stages_per_rank", "placement"}
    assert {*MANIFEST_FIELDS, *SCRIPT_SETTINGS} - of_mesh == names - {"mesh"}
    alone = Settings.from_arguments(
        context_of(None, world_size=3), {"microbatches": 2, "queues": None}
    )
    assert (alone.stages, alone.microbatches, alone.queues) == (3, 2, 8)
    with pytest.raises(InputError, match="reorder is 'best'; expected bits or sums"):
        Settings.from_arguments(context_of(None), {"reorder": "best"})


def test_a_pipeline_has_few_arguments_and_names_the_place_of_those_that_moved() -> None:
    """The check runs before anything else of a pipeline or a schedule."""
    options = {field.name for field in fields(Options)}
    assert (
        options - {"control", "cost_fn"}
        == {*Options().to_settings()}
        <= {f.name for f in fields(Settings)}
    )
    for owner, first in ((Pipeline, [nn.Identity()]), (AdaptiveSchedule, [[], 4])):
        own = inspect.signature(owner).parameters
        assert len(own) <= 21, "20, and **unknown"
        assert not options & own.keys()
        call: Any = partial(owner, *first)
        for name in sorted(options):
            place = rf"{owner.__name__}\({name}=...\) has moved; use {owner.__name__}\(options=Opt"
            with pytest.raises(InputError, match=place):
                call(context=context_of(None), **{name: 1})
        with pytest.raises(TypeError, match=r"\(\) got an unexpected keyword argument 'micro'"):
            call(context=context_of(None), micro=1)


def exchanged(context: TrainerContext) -> tuple[list[StartupInfo], list[str]]:
    """The starts of all ranks as this one received them, and its refusal."""
    mesh = MeshShape(2, 2, order=("dp_replicate", "pp"))
    module = nn.Linear(3, 2).to(torch.bfloat16)
    start = StartupInfo(
        mesh=mesh, microbatches=4,
        tensors=describe_tensors(module, mesh.find_coordinate(context.rank)),
        ties=((Holder("a.weight", 0), Holder("b.weight", 1)),),
        tied_forms={(0, context.rank): "f32[2]"}, secret=bytes(range(250, 256)),
        plan=str(context.rank),
    )  # fmt: skip
    join_process_group(context, torch.device("cpu"))
    found = gather_values(start, StartupInfo, None)
    assert found[context.rank] == start
    refused = []
    for value, kind in ((context.rank, bool), ({"mesh": {"stages": "x"}}, dict[str, MeshShape])):
        own = value if context.rank == 3 else False if kind is bool else {}
        with pytest.raises(PipelineError) as error:
            gather_values(own, Any if context.rank == 3 else kind, None)
            raise PipelineError("rank 3 does not check its own value")
        refused.append(str(error.value))
    return found, refused


def test_ranks_exchange_values_and_run_no_code_of_others() -> None:
    for rank, (starts, refused) in enumerate(run_ranks(4, exchanged)):
        assert [start.plan for start in starts] == ["0", "1", "2", "3"]
        assert {start.tensors[0].dtype for start in starts} == {torch.bfloat16}
        if rank < 3:
            assert refused[0].startswith("rank 3 sent a value that is not valid: the value: Input")
            assert "mesh.stages: Input should be a valid integer" in refused[1]


def test_a_tie_that_is_no_tie_is_refused() -> None:
    kind: Any = TypeAdapter(TiedForms)
    assert kind.validate_json(kind.dump_json({(0, 1): "x"})) == {(0, 1): "x"}
    for damaged in (b"3", b"[3]", b"[[0, 1]]", b'{"a": 1}', b'[["x", 1, "y"]]'):
        with pytest.raises(ValidationError):
            kind.validate_json(damaged)
    dtypes: Any = TypeAdapter(Dtype)
    for damaged in (b'"Tensor"', b'"__class__"', b"null", b"[]"):
        with pytest.raises(ValidationError, match="is not a dtype of torch"):
            dtypes.validate_json(damaged)


def prepared(stage: Any, **options: Any) -> tuple[RankPreparation | None, StartupInfo]:
    arguments: dict[str, Any] = {"given": {"microbatches": 4}, "plan": None, "context": None}
    arguments |= {"split": "auto", "device": torch.device("cpu"), "accelerator": None}
    arguments |= {"directed": False, "tied": None} | options
    arguments["context"] = arguments["context"] or context_of(None)
    return prepare_rank(stage if isinstance(stage, list) else [stage], **arguments)


def test_a_rank_that_cannot_take_part_says_why_instead_of_raising(tmp_path: Path) -> None:
    found, start = prepared(linear(0))
    assert found is not None and (start.refusal, start.microbatches) == ("", 4)
    assert [held.name for held in start.tensors] == ["weight", "bias"]
    assert prepared(EmulatedStage(1, 1, 1, 8))[1].tensors == ()
    (tmp_path / "file").write_text("")
    blocked = Checkpoint(directory=str(tmp_path / "file"), every=1)
    for options, error in (
        ({"stage": nn.DataParallel(linear(0))}, "the stage is wrapped in DataParallel"),
        ({"given": {}}, "microbatches is missing"),
        ({"split": "linear"}, "split is 'linear'; expected"),
        ({"tied": [("weight", 0)]}, "expected at least two (name, stage)"),
        ({"given": {"microbatches": 4, "stages": 3}}, "1 ranks cannot be cut into pipelines of 3"),
        ({"given": {"microbatches": 4, "checkpoint": blocked}}, "/file cannot be written to"),
        (
            {
                "stage": [linear(0), linear(1).to("meta")],
                "given": {"microbatches": 4, "stages_per_rank": 2},
            },
            "stage 1 is on meta, and stage 0 of the same rank on cpu; put all stages of a rank on",
        ),
        (
            {"plan": Settings(mesh=MeshShape(1), microbatches=8).make_initial_plan()},
            "microbatches is 4, and the plan that was given has 8",
        ),
    ):
        found, start = prepared(**({"stage": linear(0)} | options))
        assert found is None and error in start.refusal, start


def plan_differently(context: TrainerContext) -> str:
    """Rank 1 is of a build that plans otherwise; return its error."""
    if context.rank == 1:
        plan = Settings.make_initial_plan
        Settings.make_initial_plan = lambda self: plan(  # type: ignore[method-assign]
            replace(self, policy=Policy.ZERO_BUBBLE)
        )
    with pytest.raises(InputError) as refused:
        Pipeline(linear(0), context=context, microbatches=4, policy="1f1b")
    return str(refused.value)


def test_builds_that_plan_differently_do_not_begin() -> None:
    """Ranks derive plan 0 by themselves: the same settings may give another order elsewhere."""
    said = run_ranks(2, plan_differently)
    assert said[0] == said[1], "the same on every rank"
    pattern = (
        r"rank 1 begins with plan ([0-9a-f]{12}) and rank 0 with plan ([0-9a-f]{12}); .* install "
        "the same build of PipeMorph on both"
    )
    found = re.match(pattern, said[0])
    assert found is not None and found[1] != found[2], said[0]
    one, again = (prepared(linear(0))[1].plan for _ in range(2))
    assert one == again != ""


def one_refuses(context: TrainerContext) -> None:
    stage: nn.Module = linear(0)
    Pipeline(
        nn.DataParallel(stage) if context.rank == 1 else stage,
        context=context, loss_fn=nn.functional.mse_loss, microbatches=4,
    )  # fmt: skip


def test_a_refusal_reaches_every_rank() -> None:
    for result in Ranks(3, one_refuses).wait(60):
        last = result.error.strip().splitlines()[-1]
        assert last.startswith(
            "pipemorph.errors.InputError: rank 1: the stage is wrapped in DataParallel; give"
        ), result


def unlike(context: TrainerContext, folder: str) -> tuple[list[str], list[str], list[State]]:
    """Replicas with seeds and data of their own. Returns log lines, the errors of two misused
    steps, and the state before the pipeline, in it, after training and at the end."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipemorph.trainer").addHandler(handler)
    torch.manual_seed(context.rank)
    # Each replica collects statistics from its own batches.
    module = Lambda(
        lambda m, x: m.norm(m.up(x)),
        up=nn.Linear(4, 4),
        norm=nn.BatchNorm1d(4),
        table=nn.Buffer(torch.full((3,), float(context.rank)), persistent=False),
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def state() -> State:
        tensors = (*module.named_parameters(), *module.named_buffers())
        return {name: value.detach().clone() for name, value in tensors}

    states, refused = [state()], []
    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=2, stages=2,
        optimizer=optimizer, checkpoint=Checkpoint(directory=folder, every=2),
    ) as pipe:  # fmt: skip
        states.append(state())
        for mode in (torch.no_grad, torch.inference_mode):
            with mode(), pytest.raises(InputError) as error:
                pipe.step(torch.randn(8, 4), target=torch.randn(8, 4))
            refused.append(str(error.value))
        for _ in range(2):
            pipe.step(torch.randn(8, 4), target=torch.randn(8, 4))
            optimizer.step()
            optimizer.zero_grad()
        states.append(state())
        module.table.data.fill_(context.rank)  # type: ignore[union-attr, operator]
    return lines, refused, [*states, state()]


def test_replicas_begin_and_stay_alike(tmp_path: Path) -> None:
    results = run_ranks(4, unlike, str(tmp_path))
    for stage in (0, 1):
        (_, _, first), (_, refused, second) = results[2 * stage], results[2 * stage + 1]
        for name, value in first[0].items():
            same_bits(first[1][name], value, f"replica 0 keeps its {name}")
            for when in (1, 2, 3):
                same_bits(second[when][name], first[when][name], f"{name}, state {when}")
        assert not second[0]["up.weight"].equal(first[0]["up.weight"]), "nothing was to do"
        assert not first[2]["norm.running_mean"].equal(first[1]["norm.running_mean"])
        assert refused[0].startswith(
            f"rank {2 * stage + 1} (stage {stage}, replica 1): step() was called"
        )
        assert "under torch.no_grad(), but it needs" in refused[0]
        assert "under torch.inference_mode(), but it needs" in refused[1]
    warnings = [line for line in results[0][0] if "replicas" in line]
    (line,) = warnings
    assert (
        "rank 1 (stage 0, replica 1) in 3 of 8 tensors ('up.weight', 'up.bias', 'table'), and 1"
        in line
    )
    assert not any("replicas" in line for result in results[1:] for line in result[0])


def used_at_most() -> int:
    """Bytes of memory that this process has used at most, as a script reads it."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def miscounting(context: TrainerContext) -> tuple[list[str], list[int]]:
    """Steps more and fewer iterations than the manifest has, after it has used much memory."""
    context = replace(context, job=job(iterations=2))
    torch.ones(1 << 24)
    peak = used_at_most()
    said, done = [], []
    for steps in (1, 2, 3):
        try:
            with Pipeline(linear(0), context=context, loss_fn=nn.functional.mse_loss) as pipe:
                for _ in range(steps):
                    pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))
        except InputError as error:
            said.append(str(error))
        done.append(pipe.iteration)
    assert used_at_most() >= peak, "the script's mark was reset"
    return said, done


@pytest.mark.full
def test_a_script_steps_as_often_as_the_manifest_says() -> None:
    ((said, done),) = run_ranks(1, miscounting)
    assert done == [1, 2, 2]
    assert said == [
        "rank 0 (stage 0): closed after 1 of the 2 iterations of the manifest; step from "
        "pipe.start_iteration to spec.trainer.iterations, or lower that",
        "rank 0 (stage 0): step() was called after all 2 iterations of the manifest; step from "
        "pipe.start_iteration to spec.trainer.iterations, or raise that",
    ]
