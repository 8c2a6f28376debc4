"""The testbed by hand: build its programs, or keep a cluster open to look around in.

PYTHONPATH=tests/cluster python -m testbed build [api|node|kwok|kueue|PROGRAM ...]
PYTHONPATH=tests/cluster python -m testbed up [api|node [--images]]
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed import project_images, tools
from testbed.cluster import Cluster
from testbed.errors import TestbedError
from testbed.machine import missing_for_nodes
from testbed.node_cluster import NodeCluster

GROUPS = {"api": tools.API_TOOLS, "node": tools.NODE_TOOLS}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def opened(level: str, directory: Path, images: bool) -> Iterator[Cluster]:
    if level == "node":
        missing_for_nodes(say, project_images.NEEDED if images else {})
        tools.ensure(tools.NODE_TOOLS, say)
        archives = project_images.ensure(say) if images else {}
        mounts = project_images.torch_mounts() if images else ()
        with NodeCluster.started(directory, mounts=mounts) as cluster:
            for archive in archives.values():
                cluster.import_image(archive)
            yield cluster
        return
    tools.ensure(tools.API_TOOLS, say)
    with Cluster.own(directory) as cluster:
        yield cluster


def main() -> int:
    parser = argparse.ArgumentParser(prog="testbed", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="build programs into the cache")
    build.add_argument("names", nargs="*", default=["node"], metavar="NAME")
    build.add_argument("--jobs", type=int, help="compilers at a time (half the processors)")
    up = commands.add_parser("up", help="start a cluster and keep it until Ctrl-C")
    up.add_argument("level", nargs="?", choices=sorted(GROUPS), default="api")
    up.add_argument("--images", action="store_true", help="with the project's own images (node)")
    arguments = parser.parse_args()
    try:
        if arguments.command == "build":
            names = [tool for name in arguments.names for tool in GROUPS.get(name, (name,))]
            unknown = sorted(set(names) - set(tools.TOOLS))
            if unknown:
                parser.error(f"found {unknown}, expected api, node or some of {[*tools.TOOLS]}")
            for path in tools.ensure(names, say, arguments.jobs).values():
                print(path)
            return 0
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
        say(f"testbed: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
