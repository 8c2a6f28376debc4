"""The parts of each command: which tests they run, what they need, and what they may cost.

Each test is in exactly one part of ``make test``, ``make test-all`` and ``make test-times``, or in
``make soak``: see :mod:`gate.tiers` and ``tests/project/test_gate.py``. The parts of a command name
disjoint folders, so each file is collected once.
"""

from __future__ import annotations

from dataclasses import dataclass

from gate.tiers import FULL, TEST, TIMES

TRAINER, ENGINE, CLUSTER, RDMA = "tests/trainer", "tests/engine", "tests/cluster", "tests/rdma"
BROWSER = "tests/core/watch/test_watch_browser.py"


@dataclass(frozen=True)
class PartPlan:
    """A part: the tests of ``tier`` in ``paths`` without those in ``but``, or a ``command``."""

    name: str
    paths: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    tier: str = TEST
    expression: str = ""
    """Chooses among them by markers, as pytest's ``-m`` does."""
    command: tuple[str, ...] = ()
    """Run instead of pytest."""
    needs: tuple[str, ...] = ()
    """Names of testbeds, as ``tests/testbeds.py`` has them."""
    may_be_empty: bool = False
    """True if the selection may hold no test."""
    budget: float | None = None
    """The most processor seconds it may take, on the machine that :mod:`gate.budget` describes."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The selection as arguments of pytest."""
        chosen = ("-m", self.expression) if self.expression else ()
        ignored = (f"--ignore={path}" for path in self.but)
        empty = ("--may-be-empty",) if self.may_be_empty else ()
        return ("--tier", self.tier, *empty, *chosen, *self.paths, *ignored)


RANK_TESTS = tuple(
    f"{TRAINER}/{folder}"
    for folder in ("backward", "checkpoint", "executor", "memory", "runs", "sync", "topology")
)

TEST_PARTS = (
    PartPlan("trainer ranks", RANK_TESTS, budget=300),
    PartPlan("engine", (ENGINE,), budget=400),
    PartPlan("core", ("tests/core",), budget=320),
    PartPlan("trainer", (TRAINER,), but=RANK_TESTS, budget=280),
    PartPlan("lint", command=("make", "--no-print-directory", "lint"), budget=130),
    PartPlan("operator", ("tests/operator",), budget=70),
    PartPlan("project", ("tests/project",), budget=100),
)
"""``make test``, what takes the longest first. There are more lanes than processors, since ranks
wait for each other: a third of two processors was idle with two."""
TEST_BUDGET = 1400.0
"""Processor seconds of all of them together."""
TEST_LANES = 3
TEST_SECONDS = 1800.0
"""The most that a part may take by the clock: three times what all take on two idle processors."""
CHECK_BUDGET = 240.0
"""Processor seconds of the tests of ``make check``: two minutes in two lanes."""

SANITIZERS, MUTANTS, FUZZ = (
    f"{ENGINE}/test_engine_{name}.py" for name in ("sanitizers", "mutants", "fuzz")
)
REST_PARTS = (
    PartPlan(
        "nodes",
        (CLUSTER,),
        tier=FULL,
        expression="node",
        needs=("api", "kueue", "nodes", "images"),
    ),
    PartPlan(
        "api",
        (CLUSTER,),
        tier=FULL,
        expression="not node",
        needs=("api", "kueue", "prometheus"),
    ),
    PartPlan("runs", (f"{TRAINER}/runs",), tier=FULL),
    PartPlan("guests", (RDMA,), tier=FULL, needs=("guests",)),
    PartPlan("sanitizers", (SANITIZERS,), tier=FULL),
    PartPlan("mutants", (MUTANTS,), tier=FULL),
    PartPlan("fuzz", (FUZZ,), tier=FULL, needs=("compilers",)),
    PartPlan("pods", (f"{TRAINER}/launcher",), tier=FULL),
    PartPlan("ranks", (TRAINER,), but=(f"{TRAINER}/runs", f"{TRAINER}/launcher"), tier=FULL),
    PartPlan("engine runs", (ENGINE,), but=(SANITIZERS, MUTANTS, FUZZ), tier=FULL),
    PartPlan("others", ("tests/core", "tests/operator", "tests/project"), (BROWSER,), FULL),
    PartPlan("browser", (BROWSER,), tier=FULL, needs=("browser",)),
)
"""The rest of ``make test-all``. First what waits the longest."""
REST_LANES = 3

TIMES_PARTS = (PartPlan("times", ("tests",), but=(CLUSTER, RDMA), tier=TIMES),)
"""``make test-times``: one after the other, with the machine to themselves."""
