"""Parses hand-written YAML and JSON into plain data, with errors of one line.

Manifests and problem files use it: a duplicate key is an error, 1e3 is a number, and a file whose
aliases expand too far is rejected before it fills the memory.
"""

from __future__ import annotations

import errno
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from pipemorph.errors import InputError, one_line

MAX_DEPTH = 64


def read_text(path: str | Path, most: int) -> str:
    """Contents of a file in UTF-8, or of standard input for ``-``.

    Raises :class:`InputError`, one line that starts with the name, also for a file of more than
    ``most`` bytes: some, such as /dev/zero, are endless.
    """
    name = display_name(path)
    try:
        raw = _read_bytes(path, most + 1)
    except (OSError, ValueError) as error:
        # ValueError: a zero byte in the name.
        reason = error.strerror if isinstance(error, OSError) else None
        raise InputError(f"{name}: cannot be read: {reason or error}") from None
    if len(raw) > most:
        raise InputError(f"{name}: is larger than {most >> 20} MiB")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: is not UTF-8 text (byte {error.start})") from None


def display_name(path: str | Path) -> str:
    """Name of a file for messages."""
    text = one_line(str(path))
    return "standard input" if text == "-" else text or "a file with an empty name"


def _read_bytes(path: str | Path, most: int) -> bytes:
    if str(path) != "-":
        with Path(path).open("rb") as file:
            return file.read(most)
    if sys.stdin is None:
        raise OSError(errno.EBADF, "is closed")
    return sys.stdin.buffer.read(most)


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML loader that rejects duplicate keys; PyYAML silently uses the last of them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"duplicate key {key.value!r}", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object. Rejects duplicate keys, as the YAML loader does."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise InputError(f"is not YAML or JSON: duplicate key {one_line(repr(key))}")
        found[key] = value
    return found


def _parse_number(text: str) -> float | int:
    """Parse a number with an exponent or a fraction. 1e3 is the integer 1000, as in Kubernetes."""
    value = float(text)
    whole = value.is_integer() and abs(value) < 1 << 63 and "e" in text.lower()
    return int(value) if whole else value


def _construct_number(loader: _StrictLoader, node: yaml.Node) -> float | int:
    assert isinstance(node, yaml.ScalarNode)
    return _parse_number(str(loader.construct_scalar(node)))


# YAML 1.1 reads 1e3 as text, since it has no dot and no sign after the e.
_StrictLoader.add_implicit_resolver(
    "tag:pipemorph.io,2026:exponent",
    re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)
_StrictLoader.add_constructor("tag:pipemorph.io,2026:exponent", _construct_number)


def parse_single_document(text: str) -> object:
    """Parse text with a single document. Raises :class:`InputError`, one line without a subject."""
    if text.lstrip().startswith("{"):
        try:
            return json.loads(
                text, object_pairs_hook=_reject_duplicate_keys, parse_float=_parse_number
            )
        except (ValueError, RecursionError):
            pass  # YAML may start with a brace too; report the YAML parser's error.
    try:
        documents = [d for d in yaml.load_all(text, Loader=_StrictLoader) if d is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        reason = getattr(error, "problem", None) or str(error)
        raise InputError(f"is not YAML or JSON: {one_line(reason)}{where}") from None
    except (ValueError, TypeError, RecursionError, OverflowError, LookupError) as error:
        # PyYAML raises these for impossible dates, numbers with thousands of digits, too deep
        # nesting and bad escapes.
        raise InputError(f"is not YAML or JSON: {one_line(str(error))}") from None
    except AttributeError:
        raise InputError("is not YAML or JSON: misplaced tag") from None
    if not documents:
        raise InputError("is empty")
    if len(documents) > 1:
        raise InputError(f"has {len(documents)} documents; expected one")
    return documents[0]


def check_plain_data(document: object, values: int) -> None:
    """Raise :class:`InputError` unless the document is plain JSON data with at most ``values``
    values after alias expansion: a short file can expand to more than the memory."""
    budget = values
    todo: list[tuple[str, object, int]] = [("", document, 0)]
    while todo:
        where, value, depth = todo.pop()
        budget -= 1
        if budget < 0 or depth > MAX_DEPTH:
            raise InputError(f"has more than {values} values or {MAX_DEPTH} levels")
        match value:
            case dict():
                for key, inner in value.items():
                    if not isinstance(key, str):
                        raise InputError(
                            f"{where or 'top'}: the key {format_value(key)} is not text"
                        )
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
                    raise InputError(f"{one_line(where)}: is a number beyond 64 bits")
            case float():
                if not math.isfinite(value):
                    raise InputError(f"{one_line(where)}: is {value}; expected a finite number")
            case _:
                raise InputError(
                    f"{one_line(where)}: is {format_value(value)}, which JSON cannot represent;"
                    " quote it"
                )


def _check_text(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{one_line(where) or 'top'}: is not valid Unicode text") from None


def format_value(value: object) -> str:
    """Format a value in the document's notation, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = str(value)
    return one_line(text)
