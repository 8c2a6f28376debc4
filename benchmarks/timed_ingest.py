"""The ingest as it is, which also tells when it made each decision: for operator_scale.py.

    python benchmarks/timed_ingest.py FILE ARGUMENTS…

It appends a JSON object a line to FILE. Of a decision: its ``job``; ``at``, when it was asked for;
``waited`` for a planner, and ``planned``, seconds. Of a plan that was written to status: ``job``;
``at``, when that began; ``persisted``, seconds. Times are those of the machine's monotonic clock.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from pipemorph.control.decide.replan import Proposal, Replan
from pipemorph.ingest import Decided, PlannerPool
from pipemorph_operator.ingest import __main__ as ingest
from pipemorph_operator.ingest.store import ClusterStore


def timed(file: TextIO) -> None:
    """Let the ingest tell."""

    def tell(**what: Any) -> None:
        file.write(json.dumps(what) + "\n")
        file.flush()

    class Pool(PlannerPool):
        def __init__(
            self, processes: int, *, on_decided: Callable[[Decided], None], **more: Any
        ) -> None:
            super().__init__(processes, on_decided=self._note, **more)
            self._tell = on_decided

        def _note(self, decided: Decided) -> None:
            # Called by the task whose decision it is, which returns next.
            self._newest = decided
            self._tell(decided)

        async def __call__(self, key: tuple[str, str], asked: Replan) -> Proposal:
            at = time.monotonic()
            found = await super().__call__(key, asked)
            tell(job=key[1], at=at, waited=self._newest.waited, planned=self._newest.planned)
            return found

    class Store(ClusterStore):
        async def persist(self, namespace: str, job: str, snapshot: Mapping[str, Any]) -> None:
            at = time.monotonic()
            await super().persist(namespace, job, snapshot)
            tell(job=job, at=at, persisted=time.monotonic() - at)

    vars(ingest).update(PlannerPool=Pool, ClusterStore=Store)


if __name__ == "__main__":
    with Path(sys.argv.pop(1)).open("a", encoding="utf-8") as told:
        timed(told)
        ingest.main()
