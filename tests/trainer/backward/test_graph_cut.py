"""Cut of the graph of a compiled backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pipemorph_trainer.backward.compiled.graph_cut import GraphCut, cut_backward

ROWS, WIDTH = 6, 4


@torch.library.custom_op("pipemorph_tests::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x.clone()


@opaque.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def traced(backward: Callable[..., tuple[Tensor, ...]]) -> fx.GraphModule:
    """The graph of a backward of saved input, weight and output gradient."""
    with FakeTensorMode():
        x, w, t = torch.empty(ROWS, WIDTH), torch.empty(WIDTH, WIDTH), torch.empty(ROWS, WIDTH)
        graph = make_fx(backward)(x, w, t)
    names = iter(("primals_1", "primals_2", "tangents_1"))
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            node.name = node.target = next(names)
    graph.recompile()
    return graph


def cut_of(backward: Callable[..., tuple[Tensor, ...]], *weights: int) -> GraphCut | None:
    shape = torch.Size((WIDTH, WIDTH))
    shapes = {index: torch.Size((WIDTH,)) if index == 2 else shape for index in weights}
    return cut_backward(traced(backward), shapes)


def operators(graph: fx.GraphModule) -> list[str]:
    return [n.target._schema.name for n in graph.graph.nodes if n.op == "call_function"]


def linear(x: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    return t @ w, t.t() @ x, t.sum(0)


def test_products_and_sums_of_their_operands_are_late() -> None:
    cut = cut_of(linear, 1, 2)
    assert (cut.early, cut.late) == ((0,), (1, 2))
    assert operators(cut.first) == ["aten::mm"]
    assert sorted(operators(cut.second)) == ["aten::mm", "aten::sum", "aten::t"]
    assert cut.held_inputs == {0, 2}


def test_a_sum_of_something_else_is_early() -> None:
    cut = cut_of(lambda x, w, t: (t @ w, t.t() @ x, (t * x).sum(0)), 1, 2)
    assert cut.late == (1,)


def test_a_chain_of_products_stays_in_b_although_no_input_needs_it() -> None:
    """The first stage would otherwise do most of B's work in W."""
    cut = cut_of(lambda x, w, t: (t, (t @ w).tanh().t() @ x), 1)
    assert operators(cut.first) == ["aten::mm", "aten::tanh"]
    assert operators(cut.second) == ["aten::t", "aten::mm"]


def test_unknown_operators_stay_in_b() -> None:
    cut = cut_of(lambda x, w, t: (t @ w, t.t() @ opaque(x)), 1)
    assert "pipemorph_tests::opaque" in operators(cut.first)
    assert "pipemorph_tests::opaque" not in operators(cut.second)
    assert cut_of(lambda x, w, t: (t @ w, opaque(t.t() @ x)), 1) is None


def test_random_numbers_stay_in_b() -> None:
    cut = cut_of(lambda x, w, t: (t @ w, t.t() @ torch.bernoulli(x)), 1)
    assert "aten::bernoulli" in operators(cut.first)
    assert "aten::bernoulli" not in operators(cut.second)


def test_a_gradient_that_b_needs_is_early() -> None:
    assert cut_of(lambda x, w, t: ((t.t() @ x) * 2, t.t() @ x), 1) is not None

    def both(x: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        product = t.t() @ x
        return product.tanh(), product

    assert cut_of(both, 1) is None


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_cache_of_inductor_tells_halves_with_other_held_inputs_apart() -> None:
    """Halves overwrite other inputs, which its key does not have by itself."""
    from torch._inductor.codecache import compiled_fx_graph_hash
    from torch._inductor.virtualized import V

    whole = traced(lambda x, w, t: (t @ w,))
    cut = cut_of(lambda x, w, t: (t @ w, t.t() @ x), 1)
    assert cut is not None
    keys = []
    for graph in (whole, cut.first):
        values = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
        with V.set_fake_mode(values[0].fake_mode):
            keys.append(compiled_fx_graph_hash(graph, values, {}, [])[0])
    assert operators(whole) == operators(cut.first)
    assert keys[0] != keys[1]
