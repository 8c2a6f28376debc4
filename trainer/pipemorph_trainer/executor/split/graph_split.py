"""The graph split: cuts the autograd graph between the stage's inputs and its parameters.

A node is *inner* if an input can be reached from it. B runs only the inner nodes. If a parameter is
below exactly one inner node, B records that node's incoming gradient, and W runs the graph from
there to its parameters. If it is below several (a weight used twice), running from each of them
would count the path between them twice, so its whole gradient is computed in B, in autograd's
order. Parameters below no inner node (on the first stage: all) are computed in W from the outputs.

Every gradient passes through the parameter's accumulation node, so its hooks are called.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipemorph_trainer.executor.split.flight import Flight, Grads, Root
from pipemorph_trainer.executor.split.report import Split
from pipemorph_trainer.executor.split.splitters import Splitter


class _Marker:
    """A source of a parameter that is not a node."""


OUTPUT: Final = _Marker()
"""Below the outputs, but below no inner node."""
SEVERAL: Final = _Marker()
"""Below more than one inner node."""

Source = Node | _Marker


@dataclass
class Cut:
    """The cut of the graph of one microbatch. Parameters are in the given order."""

    below_node: dict[Node, list[nn.Parameter]] = field(default_factory=dict)
    below_outputs: list[nn.Parameter] = field(default_factory=list)
    below_several: list[nn.Parameter] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    """Leaves on which the outputs depend."""
    inner_roots: set[Node] = field(default_factory=set)


def cut_graph(
    outputs: Iterable[Root], leaves: Iterable[Tensor | None], parameters: Iterable[nn.Parameter]
) -> Cut:
    """Find the cut; see the module's docstring. Linear in the number of edges."""
    roots = [_node_of(out) for out in outputs]
    inputs = {get_gradient_edge(leaf).node: leaf for leaf in leaves if leaf is not None}
    order = _children_first(roots)

    inner: set[Node] = set()
    for node in order:
        if node in inputs or any(child in inner for child, _ in node.next_functions):
            inner.add(node)

    source: dict[Node, Source] = {}

    def reach(node: Node, origin: Source) -> None:
        if source.setdefault(node, origin) is not origin:
            source[node] = SEVERAL

    for root in roots:
        if root not in inner:
            reach(root, OUTPUT)
    for node in reversed(order):
        origin = node if node in inner else source[node]
        for child, _ in node.next_functions:
            if child is not None and child not in inner:
                reach(child, origin)

    reached = set(order)
    cut = Cut(
        inputs=[leaf for node, leaf in inputs.items() if node in reached],
        inner_roots={root for root in roots if root in inner},
    )
    for parameter in parameters:
        origin_of = source.get(get_gradient_edge(parameter).node)
        if isinstance(origin_of, Node):
            cut.below_node.setdefault(origin_of, []).append(parameter)
        elif origin_of is OUTPUT:
            cut.below_outputs.append(parameter)
        elif origin_of is SEVERAL:
            cut.below_several.append(parameter)
    return cut


def _node_of(root: Root) -> Node:
    edge: GradientEdge = root if isinstance(root, GradientEdge) else get_gradient_edge(root)
    return edge.node


def _children_first(roots: Iterable[Node]) -> list[Node]:
    """Every node below the roots, each after all of its children."""
    order: list[Node] = []
    seen: set[Node] = set()
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        stack = [(root, iter(root.next_functions))]
        while stack:
            node, children = stack[-1]
            for child, _ in children:
                if child is not None and child not in seen:
                    seen.add(child)
                    stack.append((child, iter(child.next_functions)))
                    break
            else:
                order.append(node)
                stack.pop()
    return order


@dataclass
class _Pending:
    """The work of W: parameters below each node, with the node's incoming gradients."""

    nodes: list[tuple[Node, list[nn.Parameter]]] = field(default_factory=list)
    grads: dict[Node, tuple[Tensor | None, ...]] = field(default_factory=dict)
    outputs: list[Root] = field(default_factory=list)
    output_grads: list[Tensor] | None = None
    output_parameters: list[nn.Parameter] | None = None


class GraphSplit(Splitter):
    """The graph split. Keeps all activations until W."""

    split: Split = "graph"

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self._named = {name: p for name, p in stage.named_parameters() if p.requires_grad}
        self._names = {id(p): name for name, p in self._named.items()}
        self.in_b: set[str] = set()
        """Parameters below several nodes, whose gradients B computes."""

    @property
    def uses_values(self) -> bool:
        return True

    def backward_input(self, flight: Flight, output_grads: Sequence[Tensor | None] | None) -> Grads:
        tensors, grads = flight.roots(output_grads)
        flight.outputs = ()
        flight.work = pending = _Pending()
        if not tensors:
            return flight.take_input_grads()
        cut = cut_graph(tensors, flight.leaves, self._named.values())
        self.in_b.update(self._names[id(p)] for p in cut.below_several)
        if not cut.inputs:
            pending.outputs, pending.output_grads = tensors, grads
            self.deferred.update(self._names[id(p)] for p in cut.below_outputs)
            return flight.take_input_grads()

        handles = []
        for node, parameters in cut.below_node.items():
            pending.nodes.append((node, parameters))
            handles.append(node.register_prehook(_keep(pending.grads, node)))
        try:
            torch.autograd.backward(
                tensors, grads, retain_graph=True, inputs=[*cut.inputs, *cut.below_several]
            )
        finally:
            for handle in handles:
                handle.remove()
        if cut.below_outputs:
            pending.output_parameters = cut.below_outputs
            for index, out in enumerate(tensors):
                if _node_of(out) not in cut.inner_roots:
                    pending.outputs.append(out)
                    if grads is not None:
                        pending.output_grads = [*(pending.output_grads or []), grads[index]]
        return flight.take_input_grads()

    def backward_weight(self, flight: Flight) -> None:
        pending: _Pending = flight.work
        for node, parameters in pending.nodes:
            incoming = pending.grads.pop(node, ())
            edges = [GradientEdge(node, i) for i, grad in enumerate(incoming) if grad is not None]
            if edges:
                torch.autograd.backward(
                    edges, [grad for grad in incoming if grad is not None], inputs=parameters
                )
                self.deferred.update(self._names[id(p)] for p in parameters)
        if pending.outputs:
            torch.autograd.backward(
                pending.outputs, pending.output_grads, inputs=pending.output_parameters
            )
            self.deferred.update(self._names[id(p)] for p in pending.output_parameters or ())
        flight.work = None


def _keep(into: dict[Node, tuple[Tensor | None, ...]], node: Node) -> Any:
    def hook(grads: tuple[Tensor | None, ...]) -> None:
        into[node] = tuple(grads)

    return hook
