"""Private parts of torch that compiled blocks with W apart use: only this module names them, with a
check of the installed torch.
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

from pipemorph_trainer.autograd_internals import is_compiled

CompiledCode = Callable[[list[Any]], Sequence[Any]]
"""Compiled code: receives its inputs in a list, which it empties, and returns its outputs."""
GraphCompiler = Callable[[fx.GraphModule, Sequence[Any], Collection[int] | None], CompiledCode]
"""Compiler of a graph. The last argument: inputs whose memory must not be reused; None: all."""
BackwardFactory = Callable[[fx.GraphModule, Sequence[Any], GraphCompiler, str], CompiledCode]
"""Compiler of a backward, from the compiler of its parts, and why it must stay whole, or empty."""


@cache
def find_missing_features() -> str:
    """Return the first part that this torch lacks, in one line; empty if it lacks none."""
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
        for make in (_compile_wrapped, _compile_in_place):
            if find_backend(make(_probe_backend)) is not _probe_backend:
                return "the backend of a compiled module cannot be seen"
    except (ImportError, AttributeError) as error:
        return str(error)
    return ""


def _probe_backend(graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
    return graph.forward


def _compile_wrapped(backend: Any) -> nn.Module:
    module: Any = torch.compile(nn.Identity(), backend=backend)
    return module  # type: ignore[no-any-return]


def _compile_in_place(backend: Any) -> nn.Module:
    module = nn.Identity()
    module.compile(backend=backend)
    return module


def find_backend(module: nn.Module) -> Any:
    """Return the function that compiles the graphs of a compiled module; None if it is unknown."""
    backend = _unwrap_backend(module)
    return getattr(backend, "compiler_fn", backend)


def find_cuda_graphs(module: nn.Module) -> str:
    """Return the setting that runs a module in CUDA graphs on a GPU; empty if none is seen."""
    forward = vars(module).get("forward")
    if getattr(forward, "__qualname__", "").startswith("make_graphed_callables."):
        return "make_graphed_callables"
    if find_missing_features() or not is_compiled(module):
        return ""
    from torch._inductor import config, list_mode_options

    given: Any = _unwrap_backend(module)
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


def _unwrap_backend(module: nn.Module) -> Any:
    """Return the backend of a compiled module with its settings; None if it is unknown."""
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


def has_distributed_tensor(inputs: Sequence[Any]) -> bool:
    """True if a tensor consists of several, as a DTensor does."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return any(isinstance(t, Tensor) and is_traceable_wrapper_subclass(t) for t in inputs)


def find_gradient_nodes() -> Sequence[Any] | None:
    """Return the nodes that get the gradients of the tensor arguments of the running compiled
    backward's forward; None for an argument without a gradient, and if no backward runs."""
    node = None if find_missing_features() else torch._C._current_autograd_node()
    return None if node is None else [above for above, _ in node.next_functions]


def compile_eager(graph: fx.GraphModule, inputs: Sequence[Any], backward: BackwardFactory) -> Any:
    """Compile as ``aot_eager`` does, with a backward of our own."""
    from torch._dynamo.backends.debugging import aot_eager, boxed_nop

    def compile_part(
        graph: fx.GraphModule, examples: Sequence[Any], fixed: Collection[int] | None
    ) -> Any:
        return boxed_nop(graph, list(examples))

    def compile_backward(graph: fx.GraphModule, examples: Sequence[Any]) -> CompiledCode:
        return backward(graph, examples, compile_part, "")

    return aot_eager(graph, list(inputs), bw_compiler=compile_backward)


def compile_inductor(
    graph: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any], backward: BackwardFactory
) -> Any:
    """Compile as ``inductor`` does, with a backward of our own."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_graph(
        graph: fx.GraphModule, examples: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        if not kwargs.get("is_backward"):
            return compile_fx_inner(graph, examples, *args, **kwargs)

        def compile_part(
            graph: fx.GraphModule, examples: Sequence[Any], fixed: Collection[int] | None
        ) -> Any:
            mine = {**kwargs, "static_input_idxs": ()} if fixed is None else kwargs
            with _forbid_memory_reuse(fixed):
                return compile_fx_inner(graph, examples, *args, **mine)

        why = "CUDA graphs are on, which reuse memory" if kwargs.get("cudagraphs") else ""
        return backward(graph, examples, compile_part, why)

    # A hit there would bypass `compile_graph`; then no gradient would wait for W.
    with config.patch(enable_autograd_cache=False):
        return compile_fx(
            graph, list(inputs), inner_compile=compile_graph, config_patches=options or None
        )


@contextmanager
def _forbid_memory_reuse(fixed: Collection[int] | None) -> Iterator[None]:
    """Forbid inductor to reuse the memory of these inputs; None: of all."""
    context = torch._guards.TracingContext.try_get()
    metadata: Any = None if context is None else context.fw_metadata
    given = getattr(metadata, "bw_donated_idxs", None)
    if not given or (fixed is not None and not fixed):
        yield
        return
    metadata.bw_donated_idxs = [i for i in given if fixed is not None and i not in fixed]
    try:
        yield
    finally:
        metadata.bw_donated_idxs = given


def read_mode_options(mode: str) -> dict[str, Any]:
    """Return the options that a ``mode`` of ``torch.compile`` sets."""
    from torch._inductor import list_mode_options

    found: dict[str, Any] = list_mode_options(mode)
    return found
