"""What compiled blocks with W apart use of torch without a promise: the only module that names it,
with a check of the installed torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import get_gradient_edge

from pipemorph_trainer.executor.torch_private import compiled

Runs = Callable[[list[Any]], Sequence[Any]]
"""Compiled code: takes its inputs in a list, which it empties, and returns its outputs."""
Part = Callable[[fx.GraphModule, Sequence[Any], Collection[int] | None], Runs]
"""Compiles a graph. The last argument: inputs whose memory must not be reused; None: all."""
Backward = Callable[[fx.GraphModule, Sequence[Any], Part, str], Runs]
"""Compiles a backward, with the compiler of its parts, and why it must stay whole, or empty."""


@cache
def missing() -> str:
    """What this torch lacks, in one line; empty if it lacks nothing."""
    try:
        from torch._dynamo.backends.debugging import aot_eager
        from torch._functorch.config import enable_autograd_cache  # noqa: F401
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # noqa: F401
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass  # noqa: F401

        for function, wanted in (
            (compile_fx, ("inner_compile", "config_patches")),
            (aot_eager, ("bw_compiler",)),
        ):
            has = inspect.signature(function).parameters
            for name in wanted:
                if name not in has:
                    return f"{function.__name__} has no parameter {name}"
        torch._guards.TracingContext.try_get()
        torch._C._current_autograd_node()
        node: Any = get_gradient_edge(torch.zeros(1, requires_grad=True)).node
        if not isinstance(node.variable, Tensor):
            return "the parameter of a gradient cannot be found"
        for make in (_wrapped, _in_place):
            if backend_of(make(_probe)) is not _probe:
                return "the backend of a compiled module cannot be seen"
    except (ImportError, AttributeError) as error:
        return str(error)
    return ""


def _probe(graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
    return graph.forward


def _wrapped(backend: Any) -> nn.Module:
    module: Any = torch.compile(nn.Identity(), backend=backend)
    return module  # type: ignore[no-any-return]


def _in_place(backend: Any) -> nn.Module:
    module = nn.Identity()
    module.compile(backend=backend)
    return module


def backend_of(module: nn.Module) -> Any:
    """The function that compiles the graphs of a compiled module; None if it cannot be seen."""
    backend = _given(module)
    return getattr(backend, "compiler_fn", backend)


def cuda_graphs(module: nn.Module) -> str:
    """What has a module run in CUDA graphs on a GPU, as far as can be seen; empty if nothing."""
    forward = vars(module).get("forward")
    if getattr(forward, "__qualname__", "").startswith("make_graphed_callables."):
        return "make_graphed_callables"
    if missing() or not compiled(module):
        return ""
    from torch._inductor import config, list_mode_options

    given: Any = _given(module)
    name, own = getattr(given, "compiler_name", ""), getattr(given, "kwargs", {})
    if name == "cudagraphs":
        return 'torch.compile with backend="cudagraphs"'
    options: dict[str, Any] = {}
    if name in ("inductor", "pipemorph"):
        options = {"triton.cudagraphs": config.triton.cudagraphs}
    options |= list_mode_options().get(own.get("mode") or "", {}) | (own.get("options") or {})
    options |= getattr(given, "config", {})  # Of inductor: its mode and options.
    graphs = options.get("triton.cudagraphs")
    return "torch.compile with triton.cudagraphs, as in its mode reduce-overhead" if graphs else ""


def _given(module: nn.Module) -> Any:
    """The backend of a compiled module with its settings; None if it cannot be seen."""
    known: Any = module
    context = getattr(known, "dynamo_ctx", None)
    found: list[Any] = [getattr(context, "callback", None)]
    if context is None:
        closure = getattr(known._compiled_call_impl, "__closure__", None) or ()
        found = [cell.cell_contents for cell in closure]
    backend: Any = next(
        (each for each in found if hasattr(each, "_torchdynamo_orig_backend")), None
    )
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def distributed(inputs: Sequence[Any]) -> bool:
    """Whether a tensor consists of several, as a DTensor does."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return any(isinstance(t, Tensor) and is_traceable_wrapper_subclass(t) for t in inputs)


def targets() -> Sequence[Any] | None:
    """In a compiled backward: the node that gets the gradient of each tensor argument of its
    forward, None for one without; None if no backward runs."""
    node = None if missing() else torch._C._current_autograd_node()
    return None if node is None else [above for above, _ in node.next_functions]


def compile_eager(graph: fx.GraphModule, inputs: Sequence[Any], backward: Backward) -> Any:
    """Compile as ``aot_eager`` does, with a backward of our own."""
    from torch._dynamo.backends.debugging import aot_eager, boxed_nop

    def part(graph: fx.GraphModule, examples: Sequence[Any], kept: Collection[int] | None) -> Any:
        return boxed_nop(graph, list(examples))

    def compile_backward(graph: fx.GraphModule, examples: Sequence[Any]) -> Runs:
        return backward(graph, examples, part, "")

    return aot_eager(graph, list(inputs), bw_compiler=compile_backward)


def compile_inductor(
    graph: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any], backward: Backward
) -> Any:
    """Compile as ``inductor`` does, with a backward of our own."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner(graph: fx.GraphModule, examples: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("is_backward"):
            return compile_fx_inner(graph, examples, *args, **kwargs)

        def part(
            graph: fx.GraphModule, examples: Sequence[Any], kept: Collection[int] | None
        ) -> Any:
            mine = {**kwargs, "static_input_idxs": ()} if kept is None else kwargs
            with _not_overwritten(kept):
                return compile_fx_inner(graph, examples, *args, **mine)

        why = "CUDA graphs are on, which reuse memory" if kwargs.get("cudagraphs") else ""
        return backward(graph, examples, part, why)

    # A hit there would bypass `inner`, and then nothing would wait for W.
    with config.patch(enable_autograd_cache=False):
        return compile_fx(graph, list(inputs), inner_compile=inner, config_patches=options or None)


@contextmanager
def _not_overwritten(kept: Collection[int] | None) -> Iterator[None]:
    """Forbid inductor to reuse the memory of these inputs; None: of any."""
    context = torch._guards.TracingContext.try_get()
    metadata: Any = None if context is None else context.fw_metadata
    given = getattr(metadata, "bw_donated_idxs", None)
    if not given or (kept is not None and not kept):
        yield
        return
    metadata.bw_donated_idxs = [i for i in given if kept is not None and i not in kept]
    try:
        yield
    finally:
        metadata.bw_donated_idxs = given


def mode_options(mode: str) -> dict[str, Any]:
    """The options that a ``mode`` of ``torch.compile`` stands for."""
    from torch._inductor import list_mode_options

    found: dict[str, Any] = list_mode_options(mode)
    return found
