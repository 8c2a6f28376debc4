"""The project's own images, built from its Dockerfile without a registry or a container engine.

buildah needs neither: it runs a build's steps in a chroot. The base image that the Dockerfile takes
as an argument is a Debian root made by debootstrap. Built once per content of what `.dockerignore`
lets through, and cached with the test cluster's programs.

torch is not in the trainer image of the tests: with its CUDA libraries it is 5 GB for x86-64,
which every run would unpack anew. The image is built with `TORCH=base`, and the nodes mount the
torch of the Python that runs the tests into their containers, as a vendor's base image would
have brought it.
"""

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath

from pipemorph import __version__
from testbed import tools
from testbed.errors import TestbedError
from testbed.processes import output
from testbed.steps import Say, run_step

ROOT = Path(__file__).resolve().parents[3]
TARGETS = ("operator", "trainer")
FILES = {"/usr/bin/buildah": "buildah", "/usr/sbin/debootstrap": "debootstrap"}
# Debian's release with the same Python as the tests', whose torch it must be able to load.
_SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}
_PACKAGES = "python3,python3-venv,ca-certificates"
# Search path of a distribution's Python, besides its own packages.
_SITE = PurePosixPath("/usr/local/lib/python{}.{}/dist-packages".format(*sys.version_info))
_STORED = 4
_MOST_STORAGE = 8 << 30


@dataclass(frozen=True)
class HostMount:
    """A file or folder of this machine that is there in every container of a node, read-only."""

    source: Path
    target: PurePosixPath


def image_name(target: str) -> str:
    """Name of the image in the chart and the examples, with the registry that it implies."""
    return f"docker.io/pipemorph/{target}:{__version__}"


def torch_mounts() -> list[HostMount]:
    """Mounts of torch and all it requires, as installed with the tests; none without torch."""
    mounts = {}
    for name in _closure("torch"):
        for file in distribution(name).files or ():
            top = file.parts[0]
            source = Path(str(distribution(name).locate_file(top)))
            if top not in {"..", "__pycache__"} and not top.endswith(".pth"):
                mounts[top] = HostMount(source, _SITE / top)
    return [mounts[top] for top in sorted(mounts)]


def _closure(root: str) -> Iterator[str]:
    wanted, seen = [root], set()
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            requirements = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # required elsewhere only: by another Python or platform
        yield name
        wanted += [
            re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]
            for line in requirements
            if "extra ==" not in line
        ]


def archives() -> dict[str, Path]:
    """Paths of the images of this source, or their paths once they are built, by target."""
    key = _key()
    return {target: _folder() / f"{target}-{key}.tar" for target in TARGETS}


def find() -> dict[str, Path]:
    """The images as archives for `NodeCluster.import_image`, by target. Raises TestbedError if
    those of this source are not built."""
    found = archives()
    if missing := [target for target, archive in found.items() if not archive.is_file()]:
        why = f"the images {' and '.join(missing)} of this source are not built"
        raise tools.not_ready("images", why)
    return found


def build(say: Say, end: float) -> None:
    """Build the images that are missing. `end`: a time of `time.monotonic`."""
    with tools.locked(_folder() / "lock", say, end - time.monotonic(), patient=False):
        builder = _Buildah(_folder(), say, end)
        for target, archive in archives().items():
            if not archive.is_file():
                builder.image(target, archive)
        builder.tidy()


def _folder() -> Path:
    return tools.cache_root() / "images"


def _key() -> str:
    digest = hashlib.sha256(json.dumps([_suite(), _PACKAGES, TARGETS]).encode())
    for path in _context():
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _context() -> list[Path]:
    """Files that .dockerignore lets into a build, and the two that define it."""
    lines = (ROOT / ".dockerignore").read_text().split()
    found = [ROOT / "Dockerfile", ROOT / ".dockerignore"]
    for line in lines:
        path = ROOT / line.removeprefix("!")
        if line.startswith("!") and path.exists():
            found += path.rglob("*") if path.is_dir() else [path]
    ignored = {line.removeprefix("**/") for line in lines if line.startswith("**/")}
    return sorted(
        path for path in found if path.is_file() and not ignored & {*path.parts, f"*{path.suffix}"}
    )


def _suite() -> str:
    try:
        return _SUITES[sys.version_info[:2]]
    except KeyError:
        raise TestbedError(
            f"found Python {sys.version.split()[0]}, and torch for it runs in no base image that "
            f"this testbed can make: run the tests with one of {sorted(_SUITES)}"
        ) from None


class _Buildah:
    """Builder with a store of its own, so that layers are found again by the next build."""

    def __init__(self, folder: Path, say: Say, end: float) -> None:
        self.folder = folder
        self._say = say
        self._end = end
        # Locks and mounts must not outlive a restart of the machine, so not in the cache.
        self._command: list[str | Path] = ["buildah", "--root", folder / "storage"]
        self._command += ["--runroot", Path("/run/pipemorph-buildah")]
        self._command += ["--storage-driver", "overlay"]

    def image(self, target: str, archive: Path) -> None:
        """Build one target of the Dockerfile and write it as an archive, whole or not at all."""
        arguments = {"BASE": self._base(), "TORCH": "base"}
        if "PIP_INDEX_URL" in os.environ:
            arguments["PIP_INDEX_URL"] = os.environ["PIP_INDEX_URL"]
        options = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        # Authorities of this machine, for package downloads; none stays in the image.
        options += ["--volume=/etc/ssl/certs:/etc/ssl/certs:ro", f"--target={target}"]
        self._build(f"the image {target}", [*options, f"--tag={image_name(target)}", ROOT])
        scratch = archive.with_suffix(".building")
        scratch.unlink(missing_ok=True)
        name = image_name(target)
        output(
            [*self._command, "push", "--quiet", name, f"docker-archive:{scratch}:{name}"],
            deadline=300.0,
        )
        scratch.rename(archive)

    def _base(self) -> str:
        name = f"localhost/pipemorph-testbed-base:{_suite()}"
        known = json.loads(output([*self._command, "images", "--json"]) or "[]") or []
        if any(name in (image.get("names") or ()) for image in known):
            return name
        scratch = self.folder / "base"
        shutil.rmtree(scratch, ignore_errors=True)
        context = scratch / "context"
        context.mkdir(parents=True)
        root = scratch / "root"
        options = ["--variant=minbase", f"--include={_PACKAGES}"]
        self._run("a Debian root for the base image", ["debootstrap", *options, _suite(), root])
        for path in (*root.glob("var/cache/apt/archives/*.deb"), *root.glob("var/lib/apt/lists/*")):
            if path.is_file():
                path.unlink()
        output(["tar", "-C", root, "-cf", context / "root.tar", "."], deadline=300.0)
        (context / "Dockerfile").write_text("FROM scratch\nADD root.tar /\n")
        self._build("the base image", [f"--tag={name}", context])
        shutil.rmtree(scratch)
        return name

    def _build(self, what: str, options: Sequence[str | Path]) -> None:
        self._run(what, [*self._command, "build", "--isolation=chroot", "--layers", *options])

    def _run(self, what: str, command: Sequence[str | Path]) -> None:
        run_step(f"building {what}", command, self.folder / "build.log", self._say, self._end)

    def tidy(self) -> None:
        """Keep the newest few archives, and let the store's layers not grow for ever."""
        archives = sorted(self.folder.glob("*-*.tar"), key=lambda path: path.stat().st_mtime)
        for old in archives[: -_STORED * len(TARGETS)]:
            old.unlink()
        size = 0
        for path in (self.folder / "storage").rglob("*"):
            with suppress(FileNotFoundError):
                size += 0 if path.is_symlink() else path.stat().st_size
        if size > _MOST_STORAGE:
            output([*self._command, "rmi", "--all", "--force"], deadline=300.0)
