"""Judges the mutants of an earlier run again: none that died then may survive now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutants.drawing import Mutation, find_mutations


@dataclass(frozen=True)
class Found:
    """The mutations of an earlier run in today's source."""

    mutations: Mapping[Mutation, Mutation]
    """Today's by that of then."""
    gone: Sequence[Mutation]
    """Those whose line has changed since."""


def find_again(mutations: Sequence[Mutation], files: Mapping[str, Path]) -> Found:
    """Find each mutation by its function, line, text and place among equal ones in its file."""
    found: dict[Mutation, Mutation] = {}
    gone = []
    for mutation in mutations:
        file = files.get(mutation.path)
        today = find_mutations(mutation.path, file.read_bytes()) if file is not None else []
        same = [one for one in today if _identity(one) == _identity(mutation)]
        if mutation in same:
            found[mutation] = mutation
        elif len(same) == 1:
            found[mutation] = same[0]
        else:
            gone.append(mutation)
    return Found(found, gone)


def find_test(nodeid: str, tests: Sequence[str]) -> list[str]:
    """The test ``nodeid`` among today's, else the cases of the function of that name, since files
    are moved and parameters chosen anew."""
    if nodeid in tests:
        return [nodeid]
    return [test for test in tests if _function(test) == _function(nodeid)]


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0].rpartition("::")[2]


def _identity(mutation: Mutation) -> tuple[str, ...]:
    return (mutation.function, mutation.line, mutation.operator, mutation.before, mutation.after)
