"""``python -m frugal_ingest``: the ingest, with a budget for plans that one plan of a small job
uses up. A real one takes 20 s of a processor."""

from pipemorph.ingest.planner_pool import PlannerPool
from pipemorph_operator.ingest.__main__ import main

BUDGET_SECONDS = 0.001

if __name__ == "__main__":
    PlannerPool.__init__.__kwdefaults__["budget_seconds"] = BUDGET_SECONDS
    main()
