"""Stages in CUDA graphs are refused on a device: their memory is written over too early."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from launch import run_ranks
from simulated_device import SimulatedDevice
from simulated_runs import seat
from torch import nn
from torch._inductor import config

from pipemorph.errors import InputError
from pipemorph_trainer import Pipeline, TrainerContext
from pipemorph_trainer.backward.compiled import backends, compiler_internals
from pipemorph_trainer.executor.local_stage import find_cuda_graph_refusal

ON: dict[str, Any] = {"triton.cudagraphs": True}
OFF: dict[str, Any] = {"triton.cudagraphs": False}
GRAPHS: list[dict[str, Any]] = [
    {"mode": "reduce-overhead"},
    {"mode": "max-autotune"},
    {"options": ON},
    {"backend": "cudagraphs"},
    {"backend": "pipemorph", "mode": "reduce-overhead"},
    {"backend": "pipemorph", "mode": "max-autotune"},
    {"backend": backends.pipemorph, "options": ON},
]
NO_GRAPHS: list[dict[str, Any]] = [
    {},
    {"mode": "max-autotune-no-cudagraphs"},
    {"options": OFF},
    {"backend": "aot_eager"},
    {"backend": "pipemorph"},
    {"backend": "pipemorph", "mode": "max-autotune-no-cudagraphs"},
    {"backend": "pipemorph", "options": OFF},
]


def stage() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))


def make_graphed_callables(module: nn.Module) -> None:
    """Replace a forward as torch's function of this name does, without a GPU."""

    def new_fwd(*args: Any) -> Any:
        return type(module).forward(module, *args)

    module.forward = new_fwd  # type: ignore[method-assign]


@pytest.mark.parametrize("options", GRAPHS)
def test_compiled_with_graphs(options: dict[str, Any]) -> None:
    """The model is compiled as a whole or in part, in place or wrapped."""
    made = stage()
    made[1].compile(**options)
    assert "module 1 runs in CUDA graphs (torch.compile with" in find_cuda_graph_refusal(made)
    made = stage()
    made.compile(**options)
    assert find_cuda_graph_refusal(made).startswith("the stage runs in CUDA graphs")
    assert find_cuda_graph_refusal(torch.compile(stage(), **options))
    assert find_cuda_graph_refusal(nn.Sequential(torch.compile(stage(), **options)))


@pytest.mark.parametrize("options", NO_GRAPHS)
def test_compiled_without(options: dict[str, Any]) -> None:
    made = stage()
    made[1].compile(**options)
    assert not find_cuda_graph_refusal(made)
    assert not find_cuda_graph_refusal(torch.compile(stage(), **options))
    # A setting of the process is one of inductor's, unless the block says otherwise.
    own = options.get("options") == OFF or options.get("backend") == "aot_eager"
    with config.patch({"triton.cudagraphs": True}):
        assert bool(find_cuda_graph_refusal(made)) is not own


def test_graphed_by_hand() -> None:
    """torch replaces the forward of the instance, by a function that is known by its name."""
    source = inspect.getsource(torch.cuda.graphs.make_graphed_callables)
    assert "func.forward = make_graphed_forward(" in source and "def new_fwd(" in source
    made = stage()
    assert not find_cuda_graph_refusal(made)
    make_graphed_callables(made[1][1])
    assert "module 1.1 runs in CUDA graphs (make_graphed_callables)" in find_cuda_graph_refusal(
        made
    )


def test_a_forward_that_others_replaced_is_none() -> None:
    made = stage()
    made[0].forward = lambda x: x  # type: ignore[method-assign]
    assert not find_cuda_graph_refusal(made)
    assert not compiler_internals.find_cuda_graphs(made[0])


def refused(context: TrainerContext, on_device: bool) -> str:
    """Errors of the ranks when the last stage is compiled with graphs."""
    if on_device:
        seat(SimulatedDevice(prompt=True))
    made = stage()
    if context.rank == 1:
        made[0].compile(mode="reduce-overhead")
    try:
        with Pipeline(
            made, context=context, microbatches=2, loss_fn=nn.functional.mse_loss,
            deadline_seconds=30,
        ):  # fmt: skip
            return ""
    except InputError as error:
        return str(error)


@pytest.mark.parametrize("on_device", [True, False])
def test_all_ranks_report_it_at_the_start(on_device: bool) -> None:
    """The CPU has no such graphs; there the setting changes nothing."""
    for said in run_ranks(2, refused, on_device):
        assert ("module 0 runs in CUDA graphs" in said) is on_device, said
