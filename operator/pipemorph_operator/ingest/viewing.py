"""``python -m pipemorph_operator.ingest.viewing``: makes pages of jobs on a cluster.

A child of an ingest, see :mod:`pipemorph.ingest.watch.worker`. It also asks the API server who may
watch, with the rights of the ingest.
"""

from __future__ import annotations

from pipemorph.ingest.watch import worker
from pipemorph_operator.cluster.client import Cluster
from pipemorph_operator.ingest.viewers import ViewerReviews


async def serve() -> None:
    """Answer the ingest until it ends."""
    async with await Cluster.configured() as cluster:
        await worker.serve(ViewerReviews(cluster))


if __name__ == "__main__":
    worker.run(serve)
