"""Fills docs/reference/api.md from docstrings when the site is built, as ``conf.py`` requests.

The page has a line ``<!-- api: PACKAGE.NAME -->`` where the text of a class or function goes. The
sources are parsed and not imported, so the build needs neither torch nor the compiled engine.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"pipemorph_trainer": ROOT / "trainer", "pipemorph": ROOT}
MARK = re.compile(r"^<!-- api: ([\w.]+) -->$", re.MULTILINE)
SECTION = re.compile(r"^(Args|Returns|Raises|Attributes):$")
ENTRY = re.compile(r"^ {4}(\w[\w*, ]*): (.*)$")

Documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def fill_docstrings(text: str) -> str:
    """``text`` with the docstrings of every name that it marks. Raises ``KeyError`` for a name that
    its module does not define."""
    return MARK.sub(lambda mark: describe_name(mark[1]), text)


def describe_name(name: str) -> str:
    """Markdown of a class with its public methods, or of a function."""
    node = find_definition(name)
    parts = [format_signature(node), convert_to_markdown(ast.get_docstring(node) or "")]
    if isinstance(node, ast.ClassDef):
        parts.append("\n".join(format_fields(node)))
        for member in find_members(node):
            parts += [
                f"**`{member.name}`**",
                format_signature(member),
                convert_to_markdown(read_docstring(member)),
            ]
    return "\n\n".join(part for part in parts if part)


def find_definition(name: str) -> Documented:
    """The class or function of a public name, as ``pipemorph_trainer.Pipeline``; imports in the
    modules between are followed."""
    module, _, short = name.rpartition(".")
    path = FOLDERS[module.partition(".")[0]] / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, Documented) and node.name == short:
            return node
        if isinstance(node, ast.ImportFrom) and short in (each.name for each in node.names):
            return find_definition(f"{node.module}.{short}")
    raise KeyError(f"{source.relative_to(ROOT)} does not define {short}")


def find_members(node: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Public methods and properties that have a docstring; of an overloaded one the last."""
    found = {
        member.name: member
        for member in node.body
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for name, member in found.items():
        if not name.startswith("_") and read_docstring(member):
            yield member


def format_fields(node: ast.ClassDef) -> Iterator[str]:
    """Public fields of a dataclass or a model, as entries of a list, with what documents them."""
    for number, field in enumerate(node.body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        name, below = field.target.id, node.body[number + 1 : number + 2]
        if name.startswith("_"):
            continue
        text = ""
        for each in ast.walk(field.value) if field.value else ():
            if isinstance(each, ast.keyword) and each.arg == "description":
                text = ast.literal_eval(each.value)
        for each in below:
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                text = convert_to_markdown(str(each.value.value)).replace("\n", " ")
        yield f"- `{name}: {ast.unparse(field.annotation)}`" + (f": {text}" if text else "")


def read_docstring(node: Documented) -> str:
    return ast.get_docstring(node) or ""


def format_signature(node: Documented) -> str:
    """The call as a block of Python; nothing for a class without ``__init__``, and a property."""
    function: Documented | None = node
    if isinstance(node, ast.ClassDef):
        function = next(
            (m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"), None
        )
    if function is None or isinstance(function, ast.ClassDef):
        return ""
    if any(ast.unparse(each).endswith("property") for each in function.decorator_list):
        return ""
    given = list(format_arguments(function.args))
    result = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    if isinstance(node, ast.ClassDef):
        result = ""
    call = f"{node.name}({', '.join(given)}){result}"
    if len(call) > 90:
        call = f"{node.name}(\n" + "".join(f"    {each},\n" for each in given) + f"){result}"
    return f"```python\n{call}\n```"


def format_arguments(given: ast.arguments) -> Iterator[str]:
    """Each argument with its annotation and default, without ``self``."""
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    for argument, default in zip(plain, defaults, strict=True):
        if argument.arg not in ("self", "cls"):
            yield format_argument(argument, default)
    if given.vararg:
        yield "*" + format_argument(given.vararg)
    elif given.kwonlyargs:
        yield "*"
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield format_argument(argument, default)
    if given.kwarg and not format_argument(given.kwarg).endswith(": Never"):
        yield "**" + format_argument(given.kwarg)


def format_argument(argument: ast.arg, default: ast.expr | None = None) -> str:
    text = ast.unparse(argument)
    if default is None:
        return text
    return (
        f"{text} = {ast.unparse(default)}"
        if argument.annotation
        else f"{text}={ast.unparse(default)}"
    )


def convert_to_markdown(text: str) -> str:
    """A docstring's reStructuredText as Markdown: literals, roles, and lists of arguments."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?([\w]+(?:\(\))?)`", r"`\1`", text)
    text = text.replace("``", "`")
    lines: list[str] = []
    for line in inspect.cleandoc(text).splitlines():
        if found := SECTION.match(line):
            lines += [f"**{found[1]}**", ""]
        elif found := ENTRY.match(line):
            lines.append(f"- `{found[1]}`: {found[2]}")
        else:
            lines.append(re.sub(r"^ {8}", "  ", line))
    return "\n".join(lines)
