"""The mutations that a source file allows, and the seeded draw of some of them."""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mutants.cosmetic import EQUIVALENT, is_cosmetic, is_cosmetic_argument

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: (r"is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: (r"in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
"""Pattern of the text of each operator, and the text of its mutant."""
SIGNS = {ast.Add: (r"\+", "-"), ast.Sub: ("-", "+")}
EXTREMES = {"min": "max", "max": "min"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutation:
    """Change of the source text of a function."""

    path: str
    """Path from the folder above the package: ``pipemorph/errors.py``."""
    function: str
    """Qualified name of the function."""
    chain: tuple[tuple[str, int], ...]
    """Classes and functions around the change, outermost first: each one's name and first line."""
    statement: tuple[int, int]
    """Line and column of the statement around it."""
    operator: str
    start: int
    end: int
    """The changed bytes of the source."""
    before: str
    after: str
    line: str
    """The source line of the change, stripped."""

    @property
    def package(self) -> str:
        return self.path.split("/", 1)[0]

    @property
    def line_number(self) -> int:
        return self.statement[0]

    def apply(self, source: bytes) -> bytes:
        """Return the mutant's source. Raises ValueError if ``source`` is not what it was drawn
        from."""
        if source[self.start : self.end] != self.before.encode():
            raise ValueError(
                f"{self.path}: has {source[self.start : self.end]!r} where the mutation expects "
                f"{self.before!r}: the file has changed since the draw; draw again"
            )
        return source[: self.start] + self.after.encode() + source[self.end :]


def draw(files: Mapping[str, Path], seed: int) -> Iterator[Mutation]:
    """Yield all statements of ``files`` that have mutations in random order, with one mutation of
    each. The same seed and the same files give the same order."""
    statements: dict[tuple[str, tuple[int, int]], list[Mutation]] = {}
    for path in sorted(files):
        for mutation in find_mutations(path, files[path].read_bytes()):
            statements.setdefault((path, mutation.statement), []).append(mutation)
    drawn = random.Random(seed)
    order = list(statements.values())
    drawn.shuffle(order)
    for mutations in order:
        mutation = drawn.choice(mutations)
        if _compiles(mutation, files[mutation.path]):
            yield mutation


def find_mutations(path: str, source: bytes) -> list[Mutation]:
    """Mutations inside functions of a file, in the order of its text."""
    finder = _Finder(path, source)
    finder.visit_block(ast.parse(source), ())
    known = {(one.path, one.function, one.line, one.after) for one in EQUIVALENT}
    return sorted(
        (m for m in finder.found if (m.path, m.function, m.line, m.after) not in known),
        key=lambda m: (m.start, m.end, m.after),
    )


class _Finder:
    def __init__(self, path: str, source: bytes) -> None:
        self.found: list[Mutation] = []
        self._path = path
        self._source = source
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def visit_block(self, node: ast.AST, chain: tuple[ast.ClassDef | Function, ...]) -> None:
        """Visit the statements inside ``node``, which is in the functions of ``chain``."""
        for statement in _statements_in(node):
            if is_cosmetic(statement):
                continue
            if isinstance(statement, ast.ClassDef | Function):
                self.visit_block(statement, (*chain, statement))
                continue
            if chain and isinstance(chain[-1], Function):
                for own in _nodes_of(statement):
                    for change in self._mutate(own):
                        self._add(chain, statement, change)
            self.visit_block(statement, chain)

    def _add(
        self,
        chain: tuple[ast.ClassDef | Function, ...],
        statement: ast.stmt,
        change: tuple[str, int, int, str],
    ) -> None:
        operator, start, end, after = change
        line_start = self._source.rfind(b"\n", 0, start) + 1
        line_end = self._source.find(b"\n", start)
        mutation = Mutation(
            path=self._path,
            function=".".join(outer.name for outer in chain),
            chain=tuple((outer.name, _first_line(outer)) for outer in chain),
            statement=(statement.lineno, statement.col_offset),
            operator=operator,
            start=start,
            end=end,
            before=self._source[start:end].decode(),
            after=after,
            line=self._source[line_start : line_end if line_end > 0 else None].decode().strip(),
        )
        if mutation.before == mutation.after:
            return
        self.found.append(mutation)

    def _mutate(self, node: ast.AST) -> Iterator[tuple[str, int, int, str]]:
        """The mutations of one node: operator, changed bytes, text in their place."""
        match node:
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                for one, operator, other in zip(
                    [left, *comparators], ops, comparators, strict=False
                ):
                    pattern, after = COMPARISONS[type(operator)]
                    yield from self._between("comparison", one, other, pattern, after)
            case ast.BinOp(left=one, op=ast.Add() | ast.Sub() as sign, right=other):
                yield from self._between("sign", one, other, *SIGNS[type(sign)])
            case ast.AugAssign(target=one, op=ast.Add() | ast.Sub() as sign, value=other):
                pattern, after = SIGNS[type(sign)]
                yield from self._between("sign", one, other, pattern + "=", after + "=")
            case ast.BoolOp(op=connective, values=values):
                was, after = ("and", "or") if isinstance(connective, ast.And) else ("or", "and")
                for one, other in itertools.pairwise(values):
                    yield from self._between("connective", one, other, was, after)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield "not removed", self._start(node), self._start(operand), ""
            case ast.If(test=test) | ast.IfExp(test=test):
                for value in ("True", "False"):
                    yield "condition", self._start(test), self._end(test), value
                text = self._source[self._start(test) : self._end(test)].decode()
                yield "not added", self._start(test), self._end(test), f"not ({text})"
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                yield "constant", self._start(node), self._end(node), str(number + 1)
            case ast.Call(func=ast.Name(id=name) as func) if name in EXTREMES:
                yield "extreme", self._start(func), self._end(func), EXTREMES[name]
            case ast.Return(value=ast.Constant(value=bool(value)) as constant):
                # None is not used: it is as false as False.
                yield "return", self._start(constant), self._end(constant), str(not value)
            case ast.Return(value=ast.expr() as returned) if not _is_nothing(returned):
                yield "return", self._start(returned), self._end(returned), "None"
            case ast.Expr(value=ast.Call() | ast.Await()):
                yield "call dropped", self._start(node), self._end(node), "pass"

    def _between(
        self, operator: str, one: ast.expr, other: ast.expr, pattern: str, after: str
    ) -> Iterator[tuple[str, int, int, str]]:
        """The mutation of the operator that stands between two operands."""
        start = self._end(one)
        gap = self._source[start : self._start(other)].decode()
        if (found := re.fullmatch(rf"([\s)\\]*){pattern}([\s(\\]*)", gap)) is not None:
            at = start + len(found[1].encode())
            yield operator, at, self._start(other) - len(found[2].encode()), after

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset


def _compiles(mutation: Mutation, file: Path) -> bool:
    try:
        compile(mutation.apply(file.read_bytes()), mutation.path, "exec", dont_inherit=True)
    except SyntaxError:  # as without a statement that others need
        return False
    return True


def _statements_in(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements right inside a module, function, class or compound statement."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from _statements_in(child)


def _nodes_of(node: ast.AST) -> Iterator[ast.AST]:
    """A statement and the nodes inside it, without statements inside and without cosmetic ones."""
    if isinstance(node, ast.Expr) and is_cosmetic(node.value):  # a log line
        return
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler) or is_cosmetic(child):
            continue
        if isinstance(node, ast.Call) and is_cosmetic_argument(node, child):
            continue
        if isinstance(node, ast.AnnAssign) and child is node.annotation:
            continue
        if isinstance(child, ast.match_case):
            if child.guard is not None:
                yield from _nodes_of(child.guard)
            continue
        yield from _nodes_of(child)


def _first_line(node: ast.ClassDef | Function) -> int:
    """First line as the compiler counts it: decorators are part of what they decorate."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _is_nothing(value: ast.expr) -> bool:
    return (isinstance(value, ast.Constant) and value.value is None) or (
        isinstance(value, ast.Name) and value.id == "NotImplemented"
    )
