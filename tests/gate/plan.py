"""Which tests make up which part of ``make test``, and what runs beside what.

Each test is in exactly one part, see ``tests/project/test_gate.py``. Collecting takes a while, and
importing torch takes memory: what is in one folder is looked for only there, and what nobody
named is in ``rest``.
"""

from __future__ import annotations

from dataclasses import dataclass

QUIET = (
    "project/test_planning_speed.py",
    "trainer/links/test_cuda_staging.py",
    "trainer/runs/test_offload_run.py",
    "trainer/runs/test_run.py",
    "trainer/telemetry/test_telemetry.py",
)
"""What compares times, marked ``quiet`` as a whole by ``tests/conftest.py``."""
PARTLY_QUIET = (
    "core/ingest/test_ingest_connections.py",
    "core/watch/test_watch_browser.py",
    "engine/test_engine_benchmarks.py",
    "trainer/agent/test_agent.py",
)
"""The files with tests that say ``@pytest.mark.quiet`` themselves."""
NICE = 15
"""A low priority, but not the lowest: that would come to nothing while the first run on a machine
builds Kubernetes."""
LANES = 3


@dataclass(frozen=True)
class Selection:
    """The tests of a part: those that ``expression`` of their markers chooses in ``folders``,
    without the folders in ``but``."""

    name: str
    expression: str
    folders: tuple[str, ...] = ("tests",)
    but: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    """All that have such tests, where they are known: then it looks nowhere else."""
    nice: int = 0
    timeout: int | None = None
    """The time limit of a test, in seconds, where the usual one is too short."""

    @property
    def markers(self) -> str:
        """The whole expression, with what ``make soak`` alone runs taken out."""
        return f"not soak and ({self.expression})"

    @property
    def arguments(self) -> tuple[str, ...]:
        """As pytest takes them."""
        limit = () if self.timeout is None else ("-o", f"timeout={self.timeout}")
        return (
            *("-m", self.markers, *limit, *(self.files or self.folders)),
            *(f"--ignore={folder}" for folder in self.but),
        )

    def looks_into(self, folder: str) -> bool:
        """Whether it finds tests in ``folder``: as ``tests/NAME``."""
        return folder not in self.but and bool({"tests", folder} & set(self.folders))


CLUSTER, RDMA, TRAINER, ENGINE = "tests/cluster", "tests/rdma", "tests/trainer", "tests/engine"
TESTBEDS = "cluster or node or rdma"
PATIENT = f"not (untimed or quiet or {TESTBEDS})"

BESIDE = (
    Selection("nodes", "node", (CLUSTER,)),
    Selection("api", "cluster and not node", (CLUSTER,)),
    Selection("untimed-engine", "untimed", (ENGINE,), nice=NICE, timeout=1200),
    Selection("untimed", "untimed", but=(ENGINE, TRAINER), nice=NICE, timeout=1200),
    Selection("guests", "rdma", (RDMA,)),
    Selection("trainer", f"not (quiet or {TESTBEDS})", (TRAINER,)),
    Selection("rest", PATIENT, but=(TRAINER, ENGINE)),
    Selection("engine", PATIENT, (ENGINE,)),
)
"""In this order each of :data:`LANES` lanes takes the next when it is free. First what waits for
the longest, beside what computes at low priority and so leaves the processors to it. One part for
each testbed, since two at once would only disturb each other."""
ALONE = (
    Selection(
        "quiet",
        f"quiet and not ({TESTBEDS})",
        files=tuple(f"tests/{file}" for file in sorted((*QUIET, *PARTLY_QUIET))),
    ),
)
"""One after the other, with the machine to themselves, when all others are done."""
