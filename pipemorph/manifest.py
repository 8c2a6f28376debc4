"""Reads and validates a PipeMorphJob manifest.

An invalid file raises :class:`~pipemorph.errors.InputError` before anything starts; commands print
its message and exit with status 2. The message is one line that names the field by its path in the
manifest: ``spec.parallelism.stages: is "four"; expected an integer``.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from pipemorph.errors import InputError, one_line
from pipemorph.extras import require_trainer
from pipemorph.field_names import suggest_field
from pipemorph.removed import FIELDS, POLICIES, VALUES, describe_removal
from pipemorph.spec.base import FieldError
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.yaml_json import (
    check_plain_data,
    display_name,
    format_value,
    parse_single_document,
    read_text,
)

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
        raise InputError(f"{display_name(path)}: {error}") from None


def parse_job(text: str) -> PipeMorphJob:
    """Parse the job from manifest text. Raises :class:`InputError`, one line, without file name."""
    document = parse_single_document(text)
    if not isinstance(document, dict):
        raise InputError(f"is {format_value(document)}; expected the fields of a PipeMorphJob")
    check_plain_data(document, MAX_VALUES)
    try:
        job = PipeMorphJob.model_validate(document)
    except ValidationError as error:
        raise InputError(describe_job_error(error)) from None
    _check_plannable(job)
    return job


def check_training_program(job: PipeMorphJob) -> None:
    """Raise :class:`InputError` if this host lacks the program or script of
    ``spec.trainer.command``, or if Python cannot find ``spec.trainer.module`` or torch.

    The search is that of an import, but does not run the user's code: it imports no parent package.
    """
    module, command = job.spec.trainer.module, job.spec.trainer.command
    if module is None:
        check_program(command or [], "spec.trainer.command")
        return
    require_trainer("ranks of spec.trainer.module")
    _check_module(module, "spec.trainer.module")


def check_program(command: Sequence[str], source: str) -> None:
    """Raise :class:`InputError` if this host lacks the program of a command, or the script or
    module that python or torchrun are to run. ``source``: where the command was given."""
    program = command[0] if command else ""
    if program != "python" and shutil.which(program) is None:
        raise InputError(
            f"{source}: begins with {json.dumps(program)}, which is no program on this machine's "
            "PATH; name a program, such as python"
        )
    if Path(program).name not in ("python", "torchrun"):
        return
    require_trainer(f"ranks of {source}")
    kind, name = _find_script(command[1:])
    if kind == "module":
        _check_module(name, source)
    elif kind == "script" and not Path(name).exists():
        raise InputError(f"{source}: there is no script {json.dumps(name)} in {Path.cwd()}")


def _find_script(arguments: Sequence[str]) -> tuple[Literal["module", "script", ""], str]:
    """Script or module that python or torchrun run with these arguments; ``""``: not found."""
    for i, argument in enumerate(arguments):
        if argument in ("-c", "-"):
            break
        if argument in ("-m", "--module") and i + 1 < len(arguments):
            module = arguments[i + 1]
            if module == "torch.distributed.run":
                return _find_script(arguments[i + 2 :])
            # torchrun's -m is a flag; options may follow it.
            return ("", "") if module.startswith("-") else ("module", module)
        if argument.endswith(".py") and not argument.startswith("-"):
            return "script", argument
    return "", ""


def _check_module(module: str, source: str) -> None:
    where: Sequence[str] | None = None
    found = ""
    parts = module.split(".")
    for i, part in enumerate(parts):
        found = f"{found}.{part}" if found else part
        try:
            spec = _find_module_spec(found, where)
        except (ImportError, ValueError, AttributeError, OSError):
            spec = None
        if spec is None:
            searched = "the Python path" if i == 0 else f"package {'.'.join(parts[:i])}"
            raise InputError(
                f"{source}: is {json.dumps(module)}; no module {part} in {searched}"
                " (install it, or add its folder to PYTHONPATH)"
            )
        where = spec.submodule_search_locations
        if where is None and i + 1 < len(parts):
            raise InputError(
                f"{source}: is {json.dumps(module)}; {found} is a module, not a package"
            )
    if where is not None and not _has_main(module, where):
        raise InputError(
            f"{source}: is {json.dumps(module)}, a package without a __main__ module, "
            "which python -m cannot run; name one of its modules"
        )


def _has_main(package: str, where: Sequence[str]) -> bool:
    try:
        return _find_module_spec(f"{package}.__main__", where) is not None
    except (ImportError, ValueError, AttributeError, OSError):
        return False


def _find_module_spec(
    name: str, where: Sequence[str] | None
) -> importlib.machinery.ModuleSpec | None:
    """Find a module like :func:`importlib.util.find_spec`, without importing parent packages."""
    if where is None:
        return importlib.util.find_spec(name)
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, where)
        except KeyError:
            # A namespace package. Its path would come from its parent, which is not imported.
            return _make_namespace_spec(name, where)
        if spec is not None:
            return spec
    return None


def _make_namespace_spec(name: str, where: Sequence[str]) -> importlib.machinery.ModuleSpec:
    folders = [Path(folder) / name.rpartition(".")[2] for folder in where]
    spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [str(folder) for folder in folders if folder.is_dir()]
    return spec


# --- error messages of one line --------------------------------------------------------------


def describe_job_error(error: ValidationError) -> str:
    """Describe the most specific validation error of a job in one line, in manifest notation."""
    errors = error.errors(include_url=False)
    # A misspelt field often causes two errors, an unknown field and a missing one: the first wins.
    errors.sort(key=lambda e: e["type"] != "extra_forbidden")
    first = errors[0]
    # For a union, report the alternative with the deepest error: likely the intended one.
    start = _format_path(first["loc"])
    inside = (f"{start}.", f"{start}[")
    first = max(
        (e for e in errors if f"{_format_path(e['loc'])}.".startswith(inside)),
        key=lambda e: len(_format_path(e["loc"])),
        default=first,
    )
    location, found, kind = first["loc"], first["input"], first["type"]
    where = _format_path(location)
    cause = first.get("ctx", {}).get("error")
    if kind == "extra_forbidden":
        return _describe_unknown_field(location)
    if kind == "missing":
        return f"{where}: is missing"
    if isinstance(cause, FieldError):
        inner = f"{where}.{cause.where}" if where and cause.where else where or cause.where
        return f"{one_line(inner)}: {one_line(cause.message)}"
    if kind == "value_error":
        return f"{where}: {one_line(str(cause))}"
    # YAML reads 3e-4 and yes as a number and a truth value.
    if gone := _describe_removed_value(_format_path(location), found):
        return f"{where}: is {format_value(found)}, which {gone}"
    quotes = ", in quotes" if kind == "string_type" and isinstance(found, (int, float)) else ""
    expected = _describe_expected(errors, location)
    return f"{where or 'top'}: is {format_value(found)}; expected {expected}{quotes}"


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


def _describe_expected(errors: Sequence[Any], location: tuple[int | str, ...]) -> str:
    """Describe the values that the field at ``location`` accepts; all alternatives of a union."""
    here = _format_path(location)
    wanted = []
    for error in errors:
        if _format_path(tuple(error["loc"])) == here:
            text = _describe_expectation(str(error["type"]), error.get("ctx") or {}, error["msg"])
            if text not in wanted:
                wanted.append(text)
    return " or ".join(wanted)


def _describe_expectation(kind: str, context: dict[str, Any], message: str) -> str:
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


def _describe_unknown_field(location: tuple[int | str, ...]) -> str:
    """Message for an unknown field, with the most similar known one."""
    if gone := describe_removal(FIELDS, re.sub(r"\[\d+\]", "", _format_path(location))):
        return f"{_format_path(location)}: {gone}"
    return f"{_format_path(location)}: is not a known field{suggest_field(PipeMorphJob, location)}"


def _describe_removed_value(where: str, found: object) -> str | None:
    """End of the message for a value that only an earlier version accepted; None for others."""
    if not isinstance(found, str):
        return None
    path = re.sub(r"\[\d+\]", "", where)
    replacements = {value: text for (field, value), text in VALUES.items() if field == path}
    if path == "spec.schedule.policy":
        replacements.update(POLICIES)
    return describe_removal(replacements, found)


def _format_path(location: Sequence[int | str]) -> str:
    """Path of a location: ``("spec", "faults", 0, "link")`` → ``spec.faults[0].link``.

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


def _check_plannable(job: PipeMorphJob) -> None:
    """Raise :class:`InputError` if the fields, each valid alone, allow no plan in combination."""
    # Imported late: reading a job's fields does not need the planner.
    from pipemorph.control.first_plan import make_initial_schedule

    try:
        make_initial_schedule(job.spec)
    except InputError as error:
        raise InputError(f"spec.schedule: {error}") from None
