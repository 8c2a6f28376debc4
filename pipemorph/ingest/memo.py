"""Remembers proposals, so that equal problems are planned once.

A fault of the fabric hits many jobs at once, and a job asks again what it asked before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import lru_cache
from hashlib import sha256
from typing import Any

from pydantic import BaseModel

from pipemorph.control.decide.replan import Replan
from pipemorph.planning import Plan, Schedule

_PLAIN = frozenset({type(None), bool, int, float, str})

ENTRY_BYTES = 200
"""What an entry takes beside its value."""


def comparable(asked: Replan) -> Replan:
    """The decision without the versions of its plans, on which a proposal does not depend."""
    evidence = asked.evidence
    if evidence.reference is not None:
        reference = replace(evidence.reference, plan=_unversioned(evidence.reference.plan))
        evidence = replace(evidence, reference=reference)
    return replace(
        asked,
        current=_unversioned(asked.current),
        running=_unversioned(asked.running),
        baseline=_unversioned(asked.baseline),
        previous=_unversioned(asked.previous) if asked.previous is not None else None,
        evidence=evidence,
    )


def _unversioned(plan: Plan) -> Plan:
    return replace(plan, version=0) if plan.version else plan


def digest(asked: Replan) -> bytes:
    """Equal for two decisions only if every proposal for one is a proposal for the other.

    Not of a pickle: that depends on which equal parts are the same object.
    """
    rules = asked.spec
    sections = (rules.schedule, rules.parallelism, rules.transport, rules.adaptation)
    rest = [getattr(asked, each.name) for each in fields(asked) if each.name != "spec"]
    return sha256("".join(_text((sections, rest))).encode()).digest()


def _text(value: object) -> Iterator[str]:
    """An unambiguous text of a value made of plain data."""
    match value:
        case Enum():
            yield f"{type(value).__name__}.{value.name},"
        case None | bool() | int() | float() | str():
            yield f"{value!r},"
        case Schedule():
            yield value.digest
        case BaseModel():
            yield f"{type(value).__name__}("
            yield from _texts(value.__dict__.values())
        case Mapping():
            yield "{"
            yield from _texts(sorted(value.items()))
        case Set():
            yield "{"
            yield from _texts(sorted(value))
        case list() | tuple():
            yield "("
            yield from _texts(value)
        case _ if is_dataclass(value):
            kind: Any = type(value)
            yield f"{kind.__name__}("
            yield from _texts(getattr(value, name) for name in _names(kind))
        case _:
            raise TypeError(f"a decision depends on a {type(value).__name__}, which has no digest")


def _texts(values: Iterable[Any]) -> Iterator[str]:
    values = tuple(values)
    if _PLAIN.issuperset(map(type, values)):
        yield f"{values!r})"  # The common case, in one step: a problem has thousands of numbers.
        return
    for value in values:
        yield from _text(value)
    yield ")"


@lru_cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


class Memo:
    """The newest values by their digest, in at most ``most_bytes`` of memory."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self.taken = 0
        """Bytes of all values."""
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()

    def get(self, mark: bytes) -> bytes | None:
        found = self._kept.get(mark)
        if found is not None:
            self._kept.move_to_end(mark)
        return found

    def put(self, mark: bytes, value: bytes) -> None:
        self.drop(mark)
        self._kept[mark] = value
        self.taken += len(value) + ENTRY_BYTES
        while self.taken > self._most:
            self.drop(next(iter(self._kept)))

    def drop(self, mark: bytes) -> None:
        found = self._kept.pop(mark, None)
        if found is not None:
            self.taken -= len(found) + ENTRY_BYTES
