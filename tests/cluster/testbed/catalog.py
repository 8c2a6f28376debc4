"""The testbeds by name: their parts, and whether they are ready."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from testbed import packages, project_images, tools, unpacked
from testbed.errors import TestbedError
from testbed.machine import NODE_FILES, unfit_for_nodes
from testbed.manifests import RELEASES
from testbed.packages import Need, needs
from testbed.steps import Say, run_step

BROWSER = "PIPEMORPH_TEST_BROWSER"
_CLANG_PACKAGES = ("clang-14", "libclang-rt-14-dev")
_GUEST_FILES = {
    "/usr/bin/qemu-system-x86_64": "qemu-system-x86",
    "/usr/bin/rdma": "iproute2",
    "/usr/sbin/tc": "iproute2",
    "/usr/lib/x86_64-linux-gnu/libibverbs.so.1": "libibverbs1",
    "/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so": "ibverbs-providers",
    "/usr/include/infiniband/verbs.h": "libibverbs-dev",
    "/usr/bin/ib_write_bw": "perftest",
    "/usr/lib/python3/dist-packages/pyverbs/__init__.py": "python3-pyverbs",
    "/bin/busybox": "busybox-static",
    "/sbin/modprobe": "kmod",
}
_AARCH64_FILES = {
    f"/usr/bin/{unpacked.AARCH64}-g++": f"g++-{unpacked.AARCH64}",
    "/usr/bin/qemu-aarch64-static": "qemu-user-static",
}


@dataclass(frozen=True)
class Artifact:
    """Product of a build, or of a download that is unpacked, below the cache."""

    title: str
    is_there: Callable[[], bool]
    make: Callable[[Say, float], None]
    """Makes it, until a time of `time.monotonic`."""
    needs: tuple[Need, ...] = ()
    """Requirements of making it; using it has none."""


@dataclass(frozen=True)
class Testbed:
    __test__ = False  # the name is not that of a test class

    name: str
    purpose: str
    requires: tuple[str, ...] = ()
    """Other testbeds that it runs on."""
    needs: tuple[Need, ...] = ()
    artifacts: tuple[Artifact, ...] = ()
    unfit: Callable[[], str | None] = field(default=lambda: None)
    """Reason that this machine cannot have it."""
    default: bool = True
    """True if `make test-all` needs it."""

    def missing_artifacts(self) -> list[Artifact]:
        """Artifacts that are missing, or cannot be looked for: making them says why."""
        return [artifact for artifact in self.artifacts if not _is_there(artifact)]

    def missing_packages(self) -> list[str]:
        """Debian packages that it needs, or that building it needs."""
        more = [need for artifact in self.missing_artifacts() for need in artifact.needs]
        return packages.missing_packages([*self.needs, *more])

    def why_not(self) -> str | None:
        """Reason, in one line, that its tests cannot run now; None if they can."""
        try:
            if reason := self.unfit():
                return reason
            if names := packages.missing_packages(self.needs):
                return f"found no {' '.join(names)} (Debian packages)"
            if missing := [artifact for artifact in self.artifacts if not artifact.is_there()]:
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                return f"found no {missing[0].title}{more}"
        except TestbedError as error:
            return " ".join(str(error).split())
        return None


def _is_there(artifact: Artifact) -> bool:
    try:
        return artifact.is_there()
    except TestbedError:
        return False


def find_clang() -> str | None:
    """A clang++ that has libFuzzer."""
    for name in ("clang++", "clang++-19", "clang++-16", "clang++-15", "clang++-14"):
        path = shutil.which(name)
        if path is None:
            continue
        said = subprocess.run(
            [path, "-print-resource-dir"], check=True, capture_output=True, text=True
        ).stdout.strip()
        if any(Path(said).glob("lib/**/libclang_rt.fuzzer*.a")):
            return path
    return None


def find_browser() -> str | None:
    """Program that `PIPEMORPH_TEST_BROWSER` names, otherwise the `chromium` on PATH."""
    return shutil.which(os.environ.get(BROWSER) or "chromium")


def _programs(testbed: str) -> tuple[Artifact, ...]:
    def program(name: str) -> Artifact:
        return Artifact(
            f"{name} {tools.program_version(name)}",
            lambda: tools.located(name).is_file(),
            lambda say, end: tools.build(name, say, end),
        )

    return tuple(program(name) for name in tools.PROGRAMS[testbed])


def _source(requirement: str) -> Artifact:
    def download(say: Say, end: float) -> None:
        run_step(
            f"downloading {requirement}",
            tools.download_command(requirement),
            tools.cache_root() / "download.log",
            say,
            end,
            environment={"GOWORK": "off", "GOFLAGS": "", "GONOSUMDB": "*"},
        )

    return Artifact(f"the source of {requirement}", lambda: tools.has_source(requirement), download)


def _unfit_for_browser() -> str | None:
    if find_browser() is None and (named := os.environ.get(BROWSER)):
        return f"{BROWSER} is {named}, which is no program; name one, or unset it"
    return None


def _images_built() -> bool:
    return all(archive.is_file() for archive in project_images.archives().values())


def _unfit_for_guests() -> str | None:
    machine = os.uname().machine
    if sys.platform != "linux" or machine != "x86_64":
        return f"found {sys.platform} on {machine}, and the guests need Linux on x86_64"
    return None


@cache
def testbeds() -> dict[str, Testbed]:
    """List the testbeds in the order in which they are built."""
    made = [
        Testbed(
            "compilers",
            "fuzzing the engine, faster builds",
            needs=(
                Need(_CLANG_PACKAGES, lambda: bool(find_clang())),
                *needs({"/usr/bin/ccache": "ccache"}),
            ),
        ),
        Testbed(
            "browser",
            "the live page in a headless browser",
            needs=(Need(("chromium",), lambda: bool(find_browser())),),
            unfit=_unfit_for_browser,
        ),
        Testbed(
            "prometheus",
            "alerts and dashboards",
            artifacts=(
                Artifact(
                    "prometheus and promtool",
                    lambda: all(map(unpacked.find_prometheus, unpacked.PROMETHEUS)),
                    unpacked.unpack_prometheus,
                ),
            ),
        ),
        Testbed(
            "guests",
            "RDMA verbs in two virtual machines",
            needs=needs(_GUEST_FILES),
            artifacts=(
                Artifact(
                    f"a kernel {unpacked.KERNEL_LINE} for the guests",
                    lambda: unpacked.find_kernel() is not None,
                    unpacked.unpack_kernel,
                    needs({"/sbin/depmod": "kmod"}),
                ),
            ),
            unfit=_unfit_for_guests,
        ),
        Testbed(
            "api",
            "an API server with its controllers",
            artifacts=(
                *_programs("api"),
                *(_source(release.module) for release in RELEASES.values()),
            ),
        ),
        Testbed(
            "nodes",
            "nodes that run real pods",
            requires=("api",),
            needs=needs(NODE_FILES),
            artifacts=_programs("nodes"),
            unfit=unfit_for_nodes,
        ),
        Testbed(
            "images",
            "the project's own images on those nodes",
            requires=("nodes",),
            artifacts=(
                Artifact(
                    "the images of this source",
                    _images_built,
                    project_images.build,
                    needs(project_images.FILES),
                ),
            ),
            unfit=unfit_for_nodes,
        ),
        Testbed(
            "kueue",
            "a real Kueue",
            requires=("api",),
            artifacts=(*_programs("kueue"), _source(tools.main_requirement("kueue"))),
        ),
        Testbed(
            "aarch64",
            "the engine on an emulated aarch64 (make soak)",
            needs=needs(_AARCH64_FILES),
            artifacts=(
                Artifact(
                    "libcrypto for aarch64", unpacked.has_libcrypto, unpacked.unpack_libcrypto
                ),
            ),
            default=False,
        ),
    ]
    return {testbed.name: testbed for testbed in made}


def default_names() -> list[str]:
    """The testbeds that `make test-all` needs."""
    return [name for name, testbed in testbeds().items() if testbed.default]


def with_required(names: Iterable[str]) -> list[Testbed]:
    """The testbeds and those that they run on, in the order in which they are built.

    Raises TestbedError for an unknown name.
    """
    wanted: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in testbeds():
            raise TestbedError(f"found the testbed {name}, expected some of {[*testbeds()]}")
        wanted.add(name)
        waiting += testbeds()[name].requires
    return [testbed for testbed in testbeds().values() if testbed.name in wanted]


def status(name: str) -> str | None:
    """Reason, in one line, that the tests of a testbed cannot run now; None if they can."""
    for testbed in with_required([name]):
        if why := testbed.why_not():
            return why if testbed.name == name else f"testbed {testbed.name} is not ready"
    return None


def check(names: Sequence[str]) -> None:
    """Raise TestbedError with one line that names each testbed that is not ready, and why."""
    found = {bed.name: why for bed in with_required(names) if (why := bed.why_not())}
    if found:
        listed = "; ".join(f"testbed {name} is not ready: {why}" for name, why in found.items())
        raise TestbedError(f"{listed}; run `{command(found)}` (docs/testbeds.md)")


def command(names: Iterable[str]) -> str:
    """The command that makes these testbeds."""
    if all(testbeds()[name].default for name in names):
        return "make testbeds"
    return f"python tests/testbeds.py {' '.join(names)}"
