"""Changes the code of functions that already exist: everybody who holds one runs the new code."""

from __future__ import annotations

import ast
import builtins
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

from mutants.drawing import Function, Mutation

PROBE = "__pipemorph_mutant_probe__"


class LiveFunctions:
    """Functions of this process that come from some source files."""

    def __init__(self, files: Iterable[Path]) -> None:
        names = {str(path) for path in files}
        self._by_code: dict[tuple[str, str, int], list[FunctionType]] = {}
        for thing in gc.get_objects():
            if type(thing) is FunctionType and thing.__code__.co_filename in names:
                self._by_code.setdefault(_key(thing.__code__), []).append(thing)

    def with_code(self, code: CodeType) -> list[FunctionType]:
        """Return the functions that have ``code``, or had it when this object was made."""
        return self._by_code.get(_key(code), [])


@dataclass(frozen=True)
class Replacement:
    """New code for functions of this process."""

    functions: Sequence[FunctionType]
    code: CodeType

    def install(self) -> None:
        """Put it in. Raises ValueError if it captures other variables than the functions do."""
        for function in self.functions:
            function.__code__ = self.code


def compile_mutant(functions: LiveFunctions, mutation: Mutation, file: Path) -> list[Replacement]:
    """Compile a mutation. Raises ValueError if no function of this process has it."""
    source = file.read_bytes()
    mutant = _compile(mutation.apply(source), file)
    found = list(_replacements(functions, _compile(source, file), mutant, mutation))
    if not any(replacement.functions for replacement in found):
        raise ValueError(f"{mutation.path}: no function {mutation.function} in this process")
    return found


def compile_probes(
    functions: LiveFunctions, mutations: Sequence[Mutation], files: Mapping[str, Path]
) -> list[Replacement]:
    """Compile functions in which each statement of a mutation reports its number before it runs,
    see :func:`set_probe`."""
    by_path: dict[str, dict[int, Mutation]] = {}
    for number, mutation in enumerate(mutations):
        by_path.setdefault(mutation.path, {})[number] = mutation
    found: list[Replacement] = []
    for path, numbered in by_path.items():
        source = files[path].read_bytes()
        tree = ast.parse(source)
        _Prober(numbered).visit(tree)
        probed = _compile(ast.fix_missing_locations(tree), files[path])
        original = _compile(source, files[path])
        for mutation in numbered.values():
            found += _replacements(functions, original, probed, mutation)
    return found


def set_probe(report: Callable[[int], None]) -> None:
    """Set what statements with a probe call, with the number of their mutation."""
    setattr(builtins, PROBE, report)


def _replacements(
    functions: LiveFunctions, old: CodeType, new: CodeType, mutation: Mutation
) -> Iterator[Replacement]:
    """New code for the functions around a mutation: those inside others live too, as closures."""
    for name, first_line in mutation.chain:
        old, new = (_child(outer, name, first_line) for outer in (old, new))
        yield Replacement(functions.with_code(old), new)


def _compile(source: bytes | ast.Module, file: Path) -> CodeType:
    code = compile(source, str(file), "exec", dont_inherit=True)
    assert isinstance(code, CodeType)
    return code


def _child(outer: CodeType, name: str, first_line: int) -> CodeType:
    for constant in outer.co_consts:
        if (
            isinstance(constant, CodeType)
            and constant.co_name == name
            and constant.co_firstlineno == first_line
        ):
            return constant
    raise ValueError(f"{outer.co_filename}:{first_line}: no code of {name}")


def _key(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


class _Prober(ast.NodeTransformer):
    """Puts calls of the probe before statements."""

    def __init__(self, numbered: dict[int, Mutation]) -> None:
        self._numbers: dict[tuple[int, int], list[int]] = {}
        for number, mutation in numbered.items():
            self._numbers.setdefault(mutation.statement, []).append(number)

    def visit(self, node: ast.AST) -> ast.AST | list[ast.AST]:
        super().generic_visit(node)
        if not isinstance(node, ast.stmt) or isinstance(node, ast.ClassDef | Function):
            return node
        numbers = self._numbers.get((node.lineno, node.col_offset), [])
        return [*(_call_probe(number, node) for number in numbers), node]


def _call_probe(number: int, before: ast.stmt) -> ast.stmt:
    call = ast.Call(ast.Name(PROBE, ast.Load()), [ast.Constant(number)], [])
    return ast.copy_location(ast.Expr(call), before)
