"""Reading a PipeMorphJob manifest: a good job, or one line that says what is wrong where.

Every way a file can be bad ends in :class:`~pipemorph.errors.InputError`, which commands
print before they exit 2; nothing has been started by then. The line names the field by its
path in the manifest: ``spec.parallelism.stages: is "four"; expected an integer``.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from pipemorph.errors import InputError
from pipemorph.spec import FieldError, PipeMorphJob

MAX_BYTES = 1 << 20
"""Kubernetes takes no larger object either."""
MAX_VALUES = 100_000
"""Values once aliases are followed: a short file can expand to more than memory holds."""
MAX_DEPTH = 64


def load_job(path: str | Path) -> PipeMorphJob:
    """The job in a YAML or JSON file; ``-`` reads standard input.

    Raises :class:`InputError`, one line that starts with the file's name.
    """
    name = str(path)
    try:
        if name == "-":
            raw = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(path).open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise InputError(f"{_printable(name)}: cannot be read: {reason or error}") from None
    if len(raw) > MAX_BYTES:
        raise InputError(f"{name}: is over {MAX_BYTES >> 20} MiB; a manifest is a few KB")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: is not UTF-8 text (byte {error.start})") from None
    try:
        return parse_job(text)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def parse_job(text: str) -> PipeMorphJob:
    """The job in manifest text. Raises :class:`InputError`, one line, without a file name."""
    document = _document(text)
    _check_plain(document)
    try:
        job = PipeMorphJob.model_validate(document)
    except ValidationError as error:
        raise InputError(describe(error)) from None
    _check_plan(job)
    return job


def check_module(job: PipeMorphJob) -> None:
    """Raise :class:`InputError` if Python here cannot find ``spec.trainer.module``.

    Looks where an import would look, without running any of the user's code: a package on
    the way is searched, not imported.
    """
    module = job.spec.trainer.module
    where: Sequence[str] | None = None
    found = ""
    parts = module.split(".")
    for i, part in enumerate(parts):
        found = f"{found}.{part}" if found else part
        try:
            spec = _find(found, where)
        except (ImportError, ValueError, AttributeError, OSError):
            spec = None
        if spec is None:
            searched = "the Python path" if i == 0 else f"package {'.'.join(parts[:i])}"
            raise InputError(
                f"spec.trainer.module: is {json.dumps(module)}; no module {part} in {searched}"
                " (install it, or add its folder to PYTHONPATH)"
            )
        where = spec.submodule_search_locations
        if where is None and i + 1 < len(parts):
            raise InputError(
                f"spec.trainer.module: is {json.dumps(module)}; {found} is a module, not a package"
            )
    if where is not None and not _has_main(module, where):
        raise InputError(
            f"spec.trainer.module: is {json.dumps(module)}, a package without a __main__ module, "
            "which python -m cannot run; name one of its modules"
        )


def _has_main(package: str, where: Sequence[str]) -> bool:
    try:
        return _find(f"{package}.__main__", where) is not None
    except (ImportError, ValueError, AttributeError, OSError):
        return False


def _find(name: str, where: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Like :func:`importlib.util.find_spec`, but it never imports a parent package."""
    if where is None:
        return importlib.util.find_spec(name)
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, where)
        except KeyError:
            # A folder without __init__.py: Python asks its parent, which was not imported.
            return _namespace(name, where)
        if spec is not None:
            return spec
    return None


def _namespace(name: str, where: Sequence[str]) -> importlib.machinery.ModuleSpec:
    folders = [Path(folder) / name.rpartition(".")[2] for folder in where]
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(folder) for folder in folders if folder.is_dir()]
    return spec


# --- text to plain data ----------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a repeated key is an error, as the second would win silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is there twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; like YAML's mappings here, without a repeated key."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise InputError(f"is not YAML or JSON: the key {_printable(repr(key))} is there twice")
        found[key] = value
    return found


def _number(text: str) -> float | int:
    """A number with an exponent or a fraction. 1e3 is the integer 1000, as for Kubernetes."""
    value = float(text)
    whole = value.is_integer() and abs(value) < 1 << 63 and "e" in text.lower()
    return int(value) if whole else value


def _exponent(loader: _Loader, node: yaml.Node) -> float | int:
    assert isinstance(node, yaml.ScalarNode)
    return _number(str(loader.construct_scalar(node)))


# YAML 1.1 takes 1e3 for text, since it has no dot and no sign after the e.
_Loader.add_implicit_resolver(
    "tag:pipemorph.io,2026:exponent",
    re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)
_Loader.add_constructor("tag:pipemorph.io,2026:exponent", _exponent)


def _document(text: str) -> object:
    """The only document in the text."""
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text, object_pairs_hook=_unique, parse_float=_number)
        except (ValueError, RecursionError):
            pass  # YAML may be written with braces too; its message will do.
    try:
        documents = [d for d in yaml.load_all(text, Loader=_Loader) if d is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        reason = getattr(error, "problem", None) or str(error)
        raise InputError(f"is not YAML or JSON: {_printable(reason)}{where}") from None
    except (ValueError, TypeError, RecursionError, OverflowError, LookupError) as error:
        # Impossible dates, numbers with thousands of digits, brackets nested too deep,
        # bad escapes: PyYAML lets these through.
        raise InputError(f"is not YAML or JSON: {_printable(str(error))}") from None
    except AttributeError:
        raise InputError("is not YAML or JSON: a tag stands where it cannot") from None
    if not documents:
        raise InputError("is empty; expected a PipeMorphJob")
    if len(documents) > 1:
        raise InputError(f"has {len(documents)} documents; expected one PipeMorphJob")
    return documents[0]


def _check_plain(document: object) -> None:
    """Raise :class:`InputError` unless the document is what JSON can say, and of sane size."""
    if not isinstance(document, dict):
        raise InputError(f"is {_shown(document)}; expected the fields of a PipeMorphJob")
    budget = MAX_VALUES
    todo: list[tuple[str, object, int]] = [("", document, 0)]
    while todo:
        where, value, depth = todo.pop()
        budget -= 1
        if budget < 0 or depth > MAX_DEPTH:
            raise InputError(f"has more than {MAX_VALUES} values or {MAX_DEPTH} levels")
        match value:
            case dict():
                for key, inner in value.items():
                    if not isinstance(key, str):
                        raise InputError(f"{where or 'top'}: the key {_shown(key)} is not text")
                    _check_text(where, key)
                    todo.append((f"{where}.{key}" if where else key, inner, depth + 1))
            case list():
                todo += [(f"{where}[{i}]", inner, depth + 1) for i, inner in enumerate(value)]
            case str():
                _check_text(where, value)
            case bool() | None:
                pass
            case int():
                if abs(value) >= 1 << 63:
                    raise InputError(f"{_printable(where)}: is a number beyond 64 bits")
            case float():
                if not math.isfinite(value):
                    raise InputError(f"{_printable(where)}: is {value}; expected a finite number")
            case _:
                raise InputError(
                    f"{_printable(where)}: is {_shown(value)}, which JSON cannot hold; quote it"
                )


def _check_text(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{_printable(where) or 'top'}: is not valid Unicode text") from None


# --- what is wrong, in one line --------------------------------------------------------------


def describe(error: ValidationError) -> str:
    """The most telling thing wrong with a job, as one line in the manifest's own terms."""
    errors = error.errors(include_url=False)
    # A misspelt field often shows as one unknown and one missing field: name the unknown one.
    errors.sort(key=lambda e: e["type"] != "extra_forbidden")
    first = errors[0]
    # Of the forms of a union, the one that got furthest is the one that was meant.
    start = _path(first["loc"])
    inside = (f"{start}.", f"{start}[")
    first = max(
        (e for e in errors if f"{_path(e['loc'])}.".startswith(inside)),
        key=lambda e: len(_path(e["loc"])),
        default=first,
    )
    location, found, kind = first["loc"], first["input"], first["type"]
    where = _path(location)
    cause = first.get("ctx", {}).get("error")
    if kind == "extra_forbidden":
        return _unknown_field(location)
    if kind == "missing":
        return f"{where}: is missing"
    if isinstance(cause, FieldError):
        inner = f"{where}.{cause.where}" if where and cause.where else where or cause.where
        return f"{_printable(inner)}: {_printable(cause.message)}"
    if kind == "value_error":
        return f"{where}: {_printable(str(cause))}"
    return f"{where or 'top'}: is {_shown(found)}; expected {_expected(errors, location)}"


_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "none_required": "nothing",
}

_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def _expected(errors: Sequence[Any], location: tuple[int | str, ...]) -> str:
    """What the field at ``location`` takes; for a union, each of its forms."""
    here = _path(location)
    wanted = []
    for error in errors:
        if _path(tuple(error["loc"])) == here:
            text = _one_expected(str(error["type"]), error.get("ctx") or {}, error["msg"])
            if text not in wanted:
                wanted.append(text)
    return " or ".join(wanted)


def _one_expected(kind: str, context: dict[str, Any], message: str) -> str:
    if kind in _EXPECTED:
        return _EXPECTED[kind]
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"{words} {context[key]:g}"
    match kind:
        case "literal_error":
            return f"one of {context['expected'].replace(chr(39), '').replace(' or ', ', ')}"
        case "string_pattern_mismatch":
            return _PATTERNS.get(context["pattern"], f"text that matches {context['pattern']}")
        case "string_too_long":
            return f"at most {context['max_length']} characters"
        case "too_long":
            return f"at most {context['max_length']} entries"
        case "string_too_short" | "too_short":
            return "something that is not empty"
    return f"something else ({_printable(message)})"


_PATTERNS = {
    r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$": "lower-case letters, digits and dashes, as in my-job",
    r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$": "a Python module, as in my_package.train",
}


def _unknown_field(location: tuple[int | str, ...]) -> str:
    """One line for a field that does not exist, with the nearest that does."""
    name = str(location[-1])
    model = _model_at(location[:-1])
    known = [field.alias or key for key, field in model.model_fields.items()] if model else []
    folded = {key.lower().replace("_", ""): key for key in known}
    near = get_close_matches(name.lower().replace("_", ""), folded, n=1, cutoff=0.6)
    hint = f"; did you mean {folded[near[0]]}?" if near else ""
    if not near and known:
        hint = f"; known are {', '.join(known)}"
    return f"{_path(location)}: is not a known field{hint}"


def _model_at(location: Sequence[int | str]) -> type[BaseModel] | None:
    """The model whose field could not be placed."""
    model: type[BaseModel] | None = PipeMorphJob
    for part in location:
        if isinstance(part, int) or model is None:
            continue
        field = next(
            (f for k, f in model.model_fields.items() if part in (k, f.alias)),
            None,
        )
        model = next(_models_in(field.annotation), None) if field is not None else None
    return model


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _path(location: Sequence[int | str]) -> str:
    """``("spec", "faults", 0, "link")`` → ``spec.faults[0].link``.

    Parts that name a form of a union and not a field (``int``, ``list[...]``) are left out.
    """
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _UNION_TAGS or part.startswith(("list[", "constrained-", "function-")):
            continue
        else:
            path += f".{part}" if path else part
    return _printable(path)


_UNION_TAGS = frozenset({"int", "float", "str", "bool", "none"})


def _shown(value: object) -> str:
    """A value as the manifest would say it, short."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = str(value)
    return _printable(text)


def _printable(text: str, limit: int = 200) -> str:
    """One line of printable text."""
    flat = "".join(c if c.isprintable() else " " for c in text)
    flat = " ".join(flat.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def _check_plan(job: PipeMorphJob) -> None:
    """Raise :class:`InputError` if no plan can run: each field is good, together they are not."""
    # Late: the planner is not needed to read a job's fields.
    from pipemorph.control.initial import initial_schedule

    try:
        initial_schedule(job.spec)
    except InputError as error:
        raise InputError(f"spec.schedule: {error}") from None
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise InputError(f"spec.schedule: {_printable(message)}") from None
