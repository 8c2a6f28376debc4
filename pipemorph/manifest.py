"""Reads and validates a PipeMorphJob manifest.

Every invalid file raises :class:`~pipemorph.errors.InputError` before anything is started;
commands print its message and exit with status 2. The message is one line that names the field by
its path in the manifest: ``spec.parallelism.stages: is "four"; expected an integer``.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from pipemorph.api.base import FieldError
from pipemorph.api.spec import PipeMorphJob
from pipemorph.document import check_plain, named, only_document, read_text, shown
from pipemorph.errors import InputError, one_line
from pipemorph.extras import require_trainer
from pipemorph.removed import FIELDS, POLICIES, VALUES, removal

MAX_BYTES = 1 << 20
"""Largest manifest; Kubernetes accepts no larger object either."""
MAX_VALUES = 100_000
"""Most values after alias expansion."""


def load_job(path: str | Path) -> PipeMorphJob:
    """Load the job from a YAML or JSON file; ``-`` reads standard input.

    Raises :class:`InputError`, one line that starts with the file's name.
    """
    text = read_text(path, MAX_BYTES)
    try:
        return parse_job(text)
    except InputError as error:
        raise InputError(f"{named(path)}: {error}") from None


def parse_job(text: str) -> PipeMorphJob:
    """Parse the job from manifest text. Raises :class:`InputError`, one line, without file name."""
    document = only_document(text)
    if not isinstance(document, dict):
        raise InputError(f"is {shown(document)}; expected the fields of a PipeMorphJob")
    check_plain(document, MAX_VALUES)
    try:
        job = PipeMorphJob.model_validate(document)
    except ValidationError as error:
        raise InputError(describe(error)) from None
    _check_plan(job)
    return job


def check_module(job: PipeMorphJob) -> None:
    """Raise :class:`InputError` if this host has no program or script ``spec.trainer.command``, or
    if Python cannot find ``spec.trainer.module`` or torch.

    Searches like an import, without running the user's code: parent packages are searched, not
    imported.
    """
    module, command = job.spec.trainer.module, job.spec.trainer.command
    if module is None:
        _check_command(command or [])
        return
    require_trainer("ranks of spec.trainer.module")
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


def _check_command(command: Sequence[str]) -> None:
    program, script = (*command, "", "")[:2]
    if program != "python":
        if shutil.which(program) is None:
            raise InputError(
                f"spec.trainer.command: begins with {json.dumps(program)}, which is no program on "
                "this machine's PATH; name a program, such as python"
            )
        return
    require_trainer("ranks of spec.trainer.command")
    if script and not script.startswith("-") and not Path(script).exists():
        raise InputError(
            f"spec.trainer.command: there is no script {json.dumps(script)} in {Path.cwd()}"
        )


def _has_main(package: str, where: Sequence[str]) -> bool:
    try:
        return _find(f"{package}.__main__", where) is not None
    except (ImportError, ValueError, AttributeError, OSError):
        return False


def _find(name: str, where: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """Like :func:`importlib.util.find_spec`, but never imports a parent package."""
    if where is None:
        return importlib.util.find_spec(name)
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, where)
        except KeyError:
            # A namespace package: its path would come from its parent, which is not imported.
            return _namespace(name, where)
        if spec is not None:
            return spec
    return None


def _namespace(name: str, where: Sequence[str]) -> importlib.machinery.ModuleSpec:
    folders = [Path(folder) / name.rpartition(".")[2] for folder in where]
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(folder) for folder in folders if folder.is_dir()]
    return spec


# --- error messages of one line --------------------------------------------------------------


def describe(error: ValidationError) -> str:
    """The most specific validation error of a job, as one line in the manifest's notation."""
    errors = error.errors(include_url=False)
    # A misspelt field often causes two errors, an unknown and a missing field: report the unknown.
    errors.sort(key=lambda e: e["type"] != "extra_forbidden")
    first = errors[0]
    # For a union, report the alternative with the deepest error: likely the intended one.
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
        return f"{one_line(inner)}: {one_line(cause.message)}"
    if kind == "value_error":
        return f"{where}: {one_line(str(cause))}"
    # YAML reads 3e-4 and yes as a number and a truth value.
    if gone := _removed_value(_path(location), found):
        return f"{where}: is {shown(found)}, which {gone}"
    quotes = ", in quotes" if kind == "string_type" and isinstance(found, (int, float)) else ""
    return f"{where or 'top'}: is {shown(found)}; expected {_expected(errors, location)}{quotes}"


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
    """What the field at ``location`` accepts; for a union, each alternative."""
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
        bound = context[key]
        # In full: :g prints only six digits.
        return f"{words} {int(bound) if bound == int(bound) else format(bound, 'g')}"
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
            return "a non-empty value"
    return f"another value ({one_line(message)})"


_PATTERNS = {
    r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$": "lower-case letters, digits and dashes, as in my-job",
    r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$": "a Python module, as in my_package.train",
}


def _unknown_field(location: tuple[int | str, ...]) -> str:
    """The message for an unknown field, with the most similar known one."""
    if gone := removal(FIELDS, re.sub(r"\[\d+\]", "", _path(location))):
        return f"{_path(location)}: {gone}"
    name = str(location[-1])
    model = _model_at(location[:-1])
    known = [field.alias or key for key, field in model.model_fields.items()] if model else []
    folded = {key.lower().replace("_", ""): key for key in known}
    near = get_close_matches(name.lower().replace("_", ""), folded, n=1, cutoff=0.6)
    hint = f"; did you mean {folded[near[0]]}?" if near else ""
    if not near and known:
        hint = f"; known fields: {', '.join(known)}"
    return f"{_path(location)}: is not a known field{hint}"


def _removed_value(where: str, found: object) -> str | None:
    """The end of the message that refuses a value which an earlier version accepted, if it did."""
    if not isinstance(found, str):
        return None
    path = re.sub(r"\[\d+\]", "", where)
    replacements = {value: text for (field, value), text in VALUES.items() if field == path}
    if path == "spec.schedule.policy":
        replacements.update(POLICIES)
    return removal(replacements, found)


def _model_at(location: Sequence[int | str]) -> type[BaseModel] | None:
    """The model at ``location``, which has no such field; None if not found."""
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

    Omits parts that name an alternative of a union, such as ``int`` or ``list[...]``.
    """
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _UNION_TAGS or part.startswith(("list[", "constrained-", "function-")):
            continue
        else:
            path += f".{part}" if path else part
    return one_line(path)


_UNION_TAGS = frozenset({"int", "float", "str", "bool", "none"})


def _check_plan(job: PipeMorphJob) -> None:
    """Raise :class:`InputError` if the fields, each valid alone, allow no plan together."""
    # Imported late: reading a job's fields does not need the planner.
    from pipemorph.control.first_plan import initial_schedule

    try:
        initial_schedule(job.spec)
    except InputError as error:
        raise InputError(f"spec.schedule: {error}") from None
