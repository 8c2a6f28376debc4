"""Cut of a compiled backward's graph into the part for B and the part for W.

W gets the matrix products whose results are weight gradients, and the reductions of a product's
operand, such as a bias gradient. B gets everything else, also the operands: they are in memory for
the product in any case, and B often needs their inputs as well.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

NOT_A_PRODUCT = "the gradient is not a matrix product"


@dataclass(frozen=True)
class GraphCut:
    """Pair of graphs that replace a whole graph. Positions are those of the whole graph's outputs.

    ``early``: outputs that ``first`` computes; its further outputs are for ``second``. ``late``:
    outputs of ``second``. ``held``: for each input of ``second``, the number of an input of the
    whole graph, or of an output of ``first``. ``examples``: values for ``second``'s inputs.
    """

    first: fx.GraphModule
    second: fx.GraphModule
    examples: list[Any]
    outputs: int
    early: tuple[int, ...]
    late: tuple[int, ...]
    held: tuple[tuple[int | None, int | None], ...]

    @property
    def held_inputs(self) -> set[int]:
        """Inputs of the whole graph that W needs."""
        return {index for index, _ in self.held if index is not None}


def cut_backward(whole: fx.GraphModule, weights: Mapping[int, torch.Size]) -> GraphCut | None:
    """Cut a backward graph. ``weights``: shapes of the parameters by the output that is their
    gradient. None if no gradient is a product."""
    order = list(whole.graph.nodes)
    out = order[-1]
    outputs = list(out.args[0])
    gradients = {
        index: outputs[index]
        for index, shape in weights.items()
        if isinstance(outputs[index], fx.Node) and _node_shape(outputs[index]) == shape
    }
    products = {index: _find_products(node) for index, node in gradients.items()}
    operands = {
        _strip_views(each)
        for found in products.values()
        for node in found
        for each in node.all_input_nodes
    }
    late = {
        index for index, node in gradients.items() if products[index] or _is_sum_of(node, operands)
    }
    needed = _find_ancestors(
        [
            *(n for i, n in enumerate(outputs) if i not in late and isinstance(n, fx.Node)),
            *operands,
            *(node for node in order if not _is_movable_node(node)),
        ]
    )
    needed.update(n for n in order if n.target is operator.getitem and n.args[0] in needed)
    late = {index for index in late if gradients[index] not in needed}
    if not any(products[index] for index in late):
        return None
    return _split_graph(whole, needed, tuple(sorted(late)))


def _split_graph(whole: fx.GraphModule, needed: set[fx.Node], late: tuple[int, ...]) -> GraphCut:
    order = list(whole.graph.nodes)
    outputs = list(order[-1].args[0])
    for_w: set[fx.Node] = set()
    border: set[fx.Node] = set()
    stack = [outputs[index] for index in late]
    while stack:
        node = stack.pop()
        if node in for_w or node in border:
            continue
        if node.op == "placeholder" or (node in needed and not _is_view(node)):
            border.add(node)
        else:
            for_w.add(node)
            stack.extend(node.all_input_nodes)
    inputs = [node for node in order if node.op == "placeholder"]
    # Shapes of other inputs may depend on them.
    border.update(node for node in inputs if not isinstance(node.meta.get("val"), Tensor))
    held = [node for node in order if node in border]
    crossing = [node for node in held if node.op != "placeholder"]
    early = tuple(i for i in range(len(outputs)) if i not in late)

    first, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in order:
        if node.op == "placeholder" or node in needed:
            copies[node] = first.node_copy(node, copies.__getitem__)
            if node in border and node.op == "placeholder":
                # Inductor's cache knows a graph by its code, but not which inputs it overwrites.
                copies[node].name = f"{node.name}_held"
    first.output(
        tuple(
            copies[node] if isinstance(node, fx.Node) else node
            for node in [*(outputs[index] for index in early), *crossing]
        )
    )
    second, copies = fx.Graph(), {}
    for node in held:
        copies[node] = second.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in order:
        if node in for_w:
            copies[node] = second.node_copy(node, copies.__getitem__)
    second.output(tuple(copies[outputs[index]] for index in late))
    return GraphCut(
        first=_make_graph_module(whole, first),
        second=_make_graph_module(whole, second),
        examples=[node.meta.get("val") for node in held],
        outputs=len(outputs),
        early=early,
        late=late,
        held=tuple(
            (inputs.index(node), None)
            if node.op == "placeholder"
            else (None, len(early) + crossing.index(node))
            for node in held
        ),
    )


def _make_graph_module(whole: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    graph.lint()
    out = next(reversed(graph.nodes))
    # Both halves agree on the strides of what crosses.
    out.meta["user_visible_output_idxs"] = [
        index for index, node in enumerate(out.args[0]) if isinstance(node, fx.Node)
    ]
    return fx.GraphModule(whole, graph)


def _node_shape(node: fx.Node) -> torch.Size | None:
    value = node.meta.get("val")
    return value.shape if isinstance(value, Tensor) else None


def _find_ancestors(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes and everything that they are computed from."""
    found: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


_PRODUCTS = frozenset(("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"))
_SCALED = frozenset(("aten::mul", "aten::div", "aten::neg"))
_PASSED_ON = _SCALED | {
    "aten::add", "aten::clone", "aten::_to_copy", "prims::convert_element_type",
}  # fmt: skip
_SUMS = frozenset(("aten::sum",))
_RESHAPES = frozenset(("aten::_unsafe_view", "aten::reshape"))


def _operator_name(node: fx.Node) -> str:
    """Return the operator's name without its overload; empty if the node runs none."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return ""
    return str(node.target._schema.name)


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and (
        getattr(node.target, "is_view", False) or _operator_name(node) in _RESHAPES
    )


def _strip_views(node: fx.Node) -> fx.Node:
    """Return the node without views of it."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_movable_node(node: fx.Node) -> bool:
    """True if a node gives the same result when it runs later: no collective, no random numbers, no
    op of an unknown library."""
    if node.op in ("placeholder", "output", "get_attr"):
        return True
    if node.op != "call_function" or node.is_impure():
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        seeded = torch.Tag.nondeterministic_seeded in node.target.tags
        return node.target.namespace in ("aten", "prims") and not seeded
    # Arithmetic of sizes, and parts of tuples.
    return getattr(node.target, "__module__", "") in ("_operator", "math", "torch")


def _find_products(gradient: fx.Node) -> set[fx.Node]:
    """Return the products whose sum is a gradient; none if it is no such sum."""
    found: set[fx.Node] = set()
    for node in _find_sources(gradient, lambda node: _operator_name(node) in _PRODUCTS, _PASSED_ON):
        if _operator_name(node) not in _PRODUCTS:
            return set()
        found.add(node)
    return found


def _is_sum_of(gradient: fx.Node, operands: set[fx.Node]) -> bool:
    """True if a gradient is a sum over dimensions of some of the operands."""
    sources = _find_sources(gradient, operands.__contains__, _PASSED_ON | _SUMS)
    return all(node in operands and node is not _strip_views(gradient) for node in sources)


def _find_sources(
    gradient: fx.Node, wanted: Callable[[fx.Node], bool], through: Set[str]
) -> Iterator[fx.Node]:
    """Yield the nodes from which these operators make a gradient, up to the wanted ones."""
    stack = [gradient]
    while stack:
        node = _strip_views(stack.pop())
        tensors = [
            each for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)
        ]
        linear = len(tensors) == 1 or _operator_name(node) not in _SCALED
        if wanted(node) or not tensors or not linear or _operator_name(node) not in through:
            yield node
        else:
            stack.extend(tensors)
