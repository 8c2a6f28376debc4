"""Custom resources of other projects, from their own releases.

Each comes with the project's Go module, whose content Go's checksum fixes. Nothing of it is built.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from testbed import tools
from testbed.api import ApiError, Object
from testbed.cluster import Cluster
from testbed.errors import TestbedError


@dataclass(frozen=True)
class Release:
    """A module at a version, its checksum as in a go.sum, and the folder of its CRDs."""

    module: str
    checksum: str
    folder: str


RELEASES = {
    "coscheduling": Release(
        "sigs.k8s.io/scheduler-plugins@v0.34.7",
        "h1:GENSA4rKpCKBrPvNSo2AV2QHU7j3a6LT14kNlHhXfeg=",
        "config/crd/bases",
    ),
    "jobset": Release(
        "sigs.k8s.io/jobset@v0.12.0",
        "h1:YYPuV0px8Ongq/RXmJg6V0w2UC67aiR+rCMD06vhQQQ=",
        "config/components/crd/bases",
    ),
    "kubeflow-trainer": Release(
        "github.com/kubeflow/trainer/v2@v2.2.1",
        "h1:GsM80cgxnLnd8j8+lrX/Dpcvw7DYqpxkL0ni4XA/U7Y=",
        "manifests/base/crds",
    ),
    "volcano": Release(
        "volcano.sh/volcano@v1.14.1",
        "h1:9eLs47iZeLgey6EcA1rHwVkU7HoBNm3UVpJZ4uhFJ7c=",
        "config/crd/volcano/bases",
    ),
}


@cache
def kinds(project: str) -> tuple[Object, ...]:
    """The custom resource definitions of a project. Raises TestbedError if the download is not the
    one that is pinned here."""
    release = RELEASES[project]
    folder, checksum = tools.source(release.module, "api")
    # Compared here, since Go's own database does not have every release.
    if checksum != release.checksum:
        raise TestbedError(
            f"{release.module} has the checksum {checksum}, expected {release.checksum}"
        )
    return kinds_in(folder / release.folder)


def kinds_in(folder: Path) -> tuple[Object, ...]:
    """The custom resource definitions in the YAML files of a folder. Without conversion, since a
    cluster here uses one version of each."""
    paths = sorted(folder.glob("*.yaml"))
    read = (each for path in paths for each in yaml.safe_load_all(path.read_text()))
    found = tuple(each for each in read if each and each["kind"] == "CustomResourceDefinition")
    for kind in found:
        kind["spec"].pop("conversion", None)
    return found


@contextmanager
def installed(cluster: Cluster, wanted: Sequence[Object]) -> Iterator[None]:
    """A cluster with these kinds, and without their controllers."""
    names = [kind["metadata"]["name"] for kind in wanted]
    # Too large for the annotation in which a client keeps what it has applied.
    cluster.apply(wanted, "--server-side")
    try:
        for name in names:
            cluster.wait("crds", name, "Established")
        yield
    finally:
        for name in names:
            cluster.client.delete("crds", name)
        for name in names:
            _removed(cluster, name)


def _removed(cluster: Cluster, name: str) -> None:
    """Wait until a kind is gone. The API server empties a kind's storage while it takes that down,
    and may wait for it for ever: then remaining objects stay, in a cluster that ends."""
    try:
        cluster.wait("crds", name, "deleted", deadline=30.0)
    except TestbedError:
        with suppress(ApiError):  # Gone by now.
            cluster.client.patch("crds", name, {"metadata": {"finalizers": []}})
        cluster.wait("crds", name, "deleted")
