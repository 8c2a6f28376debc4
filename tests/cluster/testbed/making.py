"""Steps of `make testbeds`: a plan, Debian packages if they may be installed, and builds."""

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from testbed import packages
from testbed.catalog import Artifact, Testbed, command
from testbed.errors import TestbedError
from testbed.steps import LimitReached, Say
from testbed.tools import cache_root

INSTALL = "TESTBEDS_INSTALL"
BUILT, FAILED, PACKAGES_MISSING, LIMIT_REACHED = 0, 1, 2, 3
"""Exit statuses."""


@dataclass
class Result:
    """Result: an exit status, and the one line that says why."""

    status: int
    line: str


@dataclass
class _Costs:
    """Seconds that each testbed took: wall-clock and processor."""

    of: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, name: str, wall: float, cpu: float) -> None:
        before = self.of.get(name, (0.0, 0.0))
        self.of[name] = (before[0] + wall, before[1] + cpu)


def plan(testbeds: Sequence[Testbed]) -> list[str]:
    """A line for each testbed: whether it is there, builds to run, and missing packages."""
    lines = []
    for testbed in testbeds:
        if reason := testbed.unfit():
            lines.append(f"{testbed.name:<11} not on this machine: {reason}")
            continue
        parts = []
        if artifacts := testbed.missing_artifacts():
            parts.append(f"to build: {', '.join(artifact.title for artifact in artifacts)}")
        if names := testbed.missing_packages():
            parts.append(f"Debian packages: {' '.join(names)}")
        lines.append(f"{testbed.name:<11} {'; '.join(parts) or 'ready'} ({testbed.purpose})")
    return lines


def make(testbeds: Sequence[Testbed], *, may_install: bool, limit: float, say: Say) -> Result:
    """Install and build what is missing, for at most `limit` seconds.

    A failed build is skipped, and the others go on. A repeated call resumes where this one ended: a
    program is there when it is complete, and Go caches what it has compiled.
    """
    end = time.monotonic() + limit
    costs = _Costs()
    done: list[str] = []
    failed: dict[str, str] = {}
    try:
        _install(testbeds, may_install, costs, say, end)
    except LimitReached as reached:
        return _limit_reached(limit, done, str(reached))
    except TestbedError as error:
        failed["the Debian packages"] = _first_line(error, say)
    for testbed in testbeds:
        if testbed.unfit():
            continue
        try:
            for artifact in testbed.missing_artifacts():
                if packages.missing_packages(artifact.needs):
                    continue  # reported with all other packages
                _make_artifact(testbed.name, artifact, costs, say, end)
                done.append(artifact.title)
        except LimitReached as reached:
            return _limit_reached(limit, done, str(reached))
        except TestbedError as error:
            failed[testbed.name] = _first_line(error, say)
    for name, (wall, cpu) in costs.of.items():
        say(f"{name}: {wall:.0f} s, {cpu:.0f} s of processor time")
    if failed:
        reasons = "; ".join(f"{name}: {why}" for name, why in failed.items())
        return Result(FAILED, f"FAILED: {reasons}")
    return _missing(testbeds, may_install)


def _install(
    testbeds: Sequence[Testbed], may_install: bool, costs: _Costs, say: Say, end: float
) -> None:
    fit = [testbed for testbed in testbeds if not testbed.unfit()]
    names = sorted({name for testbed in fit for name in testbed.missing_packages()})
    if not names or not may_install:
        return
    if not packages.can_install():
        raise TestbedError(
            f"{INSTALL}=1 installs packages as root on Debian only; this machine needs "
            f"{' '.join(names)}, under whatever names it has them"
        )
    start, used = time.monotonic(), _processor_seconds()
    packages.install(names, cache_root() / "apt.log", say, end)
    costs.add("packages", time.monotonic() - start, _processor_seconds() - used)


def _make_artifact(name: str, artifact: Artifact, costs: _Costs, say: Say, end: float) -> None:
    if time.monotonic() >= end:
        raise LimitReached(f"nothing; next is {artifact.title}")
    start, used = time.monotonic(), _processor_seconds()
    try:
        artifact.make(say, end)
    finally:
        costs.add(name, time.monotonic() - start, _processor_seconds() - used)
    if not artifact.is_there():
        raise TestbedError(f"{artifact.title} was built, and is not where it is looked for")


def _missing(testbeds: Sequence[Testbed], may_install: bool) -> Result:
    """Result of a call without failures: ready, or in need of packages."""
    fit = [testbed for testbed in testbeds if not testbed.unfit()]
    unfit = [testbed for testbed in testbeds if testbed.unfit()]
    wanted = {testbed.name: names for testbed in fit if (names := testbed.missing_packages())}
    names = sorted({name for found in wanted.values() for name in found})
    if names and may_install:
        return Result(
            FAILED, f"FAILED: installed {' '.join(names)}, and what they bring is missing"
        )
    if names:
        return Result(
            PACKAGES_MISSING,
            f"Debian packages are missing for {', '.join(wanted)}: "
            f"`{INSTALL}=1 {command(wanted)}` installs them as root, or run "
            f"`apt-get {' '.join(packages.install_words(names))}`",
        )
    if unfit:
        reasons = "; ".join(f"{testbed.name}: {testbed.unfit()}" for testbed in unfit)
        return Result(FAILED, f"ready: {', '.join(bed.name for bed in fit)}; FAILED: {reasons}")
    return Result(BUILT, f"ready: {', '.join(testbed.name for testbed in fit)}")


def _limit_reached(limit: float, done: Sequence[str], under_way: str) -> Result:
    return Result(
        LIMIT_REACHED,
        f"the limit of {limit:.0f} s is over; done in this call: {', '.join(done) or 'nothing'}; "
        f"under way: {under_way}; `make testbeds` goes on from here",
    )


def _first_line(error: TestbedError, say: Say) -> str:
    """Print the whole error, which may have a log's end, and return its first line."""
    text = str(error)
    if "\n" in text:
        say(text)
    return text.splitlines()[0]


def _processor_seconds() -> float:
    """Processor seconds of all programs that this process started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
