"""The mutants that say nothing about the tests: each pattern and each entry was read and agreed."""

from __future__ import annotations

import ast
from dataclasses import dataclass

LOG_METHODS = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log"})
LOG_OBJECTS = frozenset({"log", "logger", "_log", "logging"})
WAITS = frozenset({"timeout", "timeout_s", "interval", "poll", "backlog", "indent", "maxsize"})
"""Keywords whose integers are a matter of taste: a wait of 61 s for one of 60 s."""


@dataclass(frozen=True)
class Equivalent:
    """A mutant that behaves as the original, found by reading it. It is named by its text, since
    line numbers move."""

    path: str
    function: str
    line: str
    """The source line of the change, stripped."""
    after: str
    """The text that the mutant has in place of the original's."""
    why: str


EQUIVALENT: tuple[Equivalent, ...] = (
    Equivalent(
        "pipemorph/replay/simulated_links.py",
        "SimulatedLinks._compute_delay",
        "drawn = state.jitter * self._draw_jitter(iteration, link, sent) if state.jitter else 0.0",
        "True",
        "a jitter of 0 times a number without side effects is 0 as well",
    ),
    Equivalent(
        "pipemorph_trainer/executor/emulated_stage.py",
        "mix_bits",
        "return value ^ (value >> 31)",
        "32",
        "another mixer that is as good",
    ),
)


def is_cosmetic(node: ast.AST) -> bool:
    """True if mutations of ``node`` and of all inside it are skipped."""
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr():
            # The text of an exception; what cannot happen; text, without usable positions.
            return True
        case ast.Expr(value=ast.Constant()):  # a docstring
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)):
            return name in LOG_OBJECTS and method in LOG_METHODS
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.FunctionDef(name="__repr__"):
            return True
        case ast.keyword(arg=name, value=ast.Constant()):
            return name in WAITS
    return False


def is_cosmetic_argument(call: ast.Call, argument: ast.AST) -> bool:
    """True if ``argument`` of ``call`` is the number of digits to which text is rounded."""
    return (
        isinstance(call.func, ast.Name)
        and call.func.id == "round"
        and len(call.args) == 2
        and argument is call.args[1]
    )
