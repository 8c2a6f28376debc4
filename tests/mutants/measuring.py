"""Finds which tests execute which mutated statements, and what each test costs.

Not by tracing: each statement of a drawn mutation gets a probe, see :mod:`mutants.code`, and all
tests run once. That costs what the tests cost. A statement that a fixture of a module or session
executes counts for every test that uses the fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mutants import code
from mutants.drawing import Mutation
from mutants.forks import Fork, Limit


@dataclass
class Measured:
    """The tests by node id: those that passed, and why the others cannot judge."""

    seconds: dict[str, float] = field(default_factory=dict)
    wall_seconds: dict[str, float] = field(default_factory=dict)
    tests: dict[int, list[str]] = field(default_factory=dict)
    """Tests that execute the statement of each mutation, by its number, cheapest first."""
    unusable: dict[str, str] = field(default_factory=dict)


def measure_tests(
    session: pytest.Session,
    functions: code.LiveFunctions,
    mutations: Sequence[Mutation],
    files: dict[str, Path],
    *,
    most_seconds: float,
    say: Callable[[str], None],
) -> Measured:
    """Run all collected tests with probes. A test that takes more than ``most_seconds`` is stopped
    and not used."""
    recorder = _Recorder()

    probes = code.compile_probes(functions, mutations, files)

    def prepare(session: pytest.Session) -> None:
        for probe in probes:
            probe.install()
        code.set_probe(recorder.record)
        session.config.pluginmanager.register(recorder, "mutants-recorder")

    measured = Measured()
    tests: dict[int, list[str]] = {}
    remaining = list(session.items)
    # A stopped test may have been stopped on the way: limits are for the process's own seconds.
    limit = Limit(most_seconds, 10 * most_seconds + 30)
    while remaining:
        fork = Fork(
            session, remaining, lambda item: limit, prepare, recorder.hits_of, until_failure=False
        )
        ended = 0
        for ran in fork.run():
            ended += 1
            if ran.outcome != "passed":
                measured.unusable[ran.nodeid] = f"{ran.outcome}: {ran.why}".strip(": ")
                continue
            measured.seconds[ran.nodeid] = ran.processor_seconds
            measured.wall_seconds[ran.nodeid] = ran.wall_seconds
            for number in ran.hits:
                tests.setdefault(number, []).append(ran.nodeid)
            if len(measured.seconds) % 200 == 0:
                say(f"measured {len(measured.seconds)} of {len(session.items)} tests")
        if fork.error is not None:
            raise RuntimeError(f"the measuring process: {fork.error}")
        if fork.stopped is not None:
            measured.unusable[fork.stopped] = f"stopped: takes more than {most_seconds} s, or died"
            ended += 1
        remaining = remaining[ended:]
    measured.tests = {
        number: sorted(nodeids, key=lambda nodeid: measured.seconds[nodeid])
        for number, nodeids in tests.items()
    }
    return measured


class _Recorder:
    """A plugin that records which probes were reached since the last test."""

    def __init__(self) -> None:
        self._reached: set[int] = set()
        self._by_fixture: dict[int, set[int]] = {}

    def record(self, number: int) -> None:
        self._reached.add(number)

    def hits_of(self, item: pytest.Item) -> list[int]:
        """Return what ``item``, which has ended, reached, its fixtures' part included."""
        reached, self._reached = self._reached, set()
        fixtures: dict[str, Any] = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009
        for definitions in fixtures.values():
            for definition in definitions:
                reached |= self._by_fixture.get(id(definition), set())
        return sorted(reached)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Generator[None, None, None]:
        before, self._reached = self._reached, set()
        yield
        if fixturedef.scope != "function":
            self._by_fixture[id(fixturedef)] = set(self._reached)
        self._reached |= before
