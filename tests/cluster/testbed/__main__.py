"""Cluster for exploration by hand.

PYTHONPATH=tests/cluster python -m testbed up [api|node [--images]]
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed import catalog, project_images
from testbed.cluster import Cluster
from testbed.errors import TestbedError
from testbed.node_cluster import NodeCluster


@contextmanager
def opened(level: str, directory: Path, images: bool) -> Iterator[Cluster]:
    if level == "node":
        catalog.check(["images" if images else "nodes"])
        archives = project_images.find() if images else {}
        mounts = project_images.torch_mounts() if images else ()
        with NodeCluster.started(directory, mounts=mounts) as cluster:
            for archive in archives.values():
                cluster.import_image(archive)
            yield cluster
        return
    catalog.check(["api"])
    with Cluster.own(directory) as cluster:
        yield cluster


def main() -> int:
    parser = argparse.ArgumentParser(prog="testbed", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a cluster and keep it until Ctrl-C")
    up.add_argument("level", nargs="?", choices=["api", "node"], default="api")
    up.add_argument("--images", action="store_true", help="with the project's own images (node)")
    arguments = parser.parse_args()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="testbed-") as folder,
            opened(arguments.level, Path(folder), arguments.images) as cluster,
        ):
            print(f"Kubernetes {cluster.version}; Ctrl-C ends it", file=sys.stderr)
            print(f"export KUBECONFIG={cluster.admin}", flush=True)
            ends = {signal.SIGINT, signal.SIGTERM}
            # Blocked only now: the programs of the cluster would inherit it.
            signal.pthread_sigmask(signal.SIG_BLOCK, ends)
            signal.sigwait(ends)
        return 0
    except TestbedError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
