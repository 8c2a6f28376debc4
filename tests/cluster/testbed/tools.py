"""The programs a test cluster is made of: found where the user keeps them, or built once.

Order of search for each program:
1. the folder `KUBEBUILDER_ASSETS` names, if it is set and holds the program;
2. `~/.cache/pipemorph/<module>/<key>/bin`, filled from the Go modules in `tests/cluster/tools`.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from testbed.errors import TestbedError
from testbed.processes import Process, output
from testbed.waiting import NotYet, wait_for

MODULES = Path(__file__).resolve().parent.parent / "tools"
# A cold build of everything on two shared cores takes under half of this.
BUILD_DEADLINE = 3600.0
SAY_EVERY = 15.0
# Where Go's own archive puts it, on the PATH of a login shell only.
GO_ELSEWHERE = Path("/usr/local/go/bin/go")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Tool:
    module: str
    package: str


TOOLS = {
    "etcd": Tool("kubernetes", "go.etcd.io/etcd/server/v3"),
    "kube-apiserver": Tool("kubernetes", "k8s.io/kubernetes/cmd/kube-apiserver"),
    "kube-controller-manager": Tool("kubernetes", "k8s.io/kubernetes/cmd/kube-controller-manager"),
    "kubectl": Tool("kubernetes", "k8s.io/kubernetes/cmd/kubectl"),
    "kube-scheduler": Tool("kubernetes", "k8s.io/kubernetes/cmd/kube-scheduler"),
    "kube-proxy": Tool("kubernetes", "k8s.io/kubernetes/cmd/kube-proxy"),
    "kubelet": Tool("kubernetes", "k8s.io/kubernetes/cmd/kubelet"),
    "device-plugin": Tool("kubernetes", "./device-plugin"),
    "coredns": Tool("coredns", "."),
    "netpol": Tool("netpol", "."),
    "helm": Tool("helm", "helm.sh/helm/v4/cmd/helm"),
    "kwok": Tool("kwok", "sigs.k8s.io/kwok/cmd/kwok"),
    "kueue": Tool("kueue", "sigs.k8s.io/kueue/cmd/kueue"),
}
API_TOOLS = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl", "helm")
NODE_TOOLS = (
    *API_TOOLS, "kube-scheduler", "kube-proxy", "kubelet", "device-plugin", "coredns", "netpol",
)  # fmt: skip

KWOK_TOOLS = ("kwok", "kube-scheduler")
KUEUE_TOOLS = ("kueue",)

# The module whose version names a build, and where it wants that version linked in. An API server
# that calls itself v0.0.0 fails every `kubeVersion` a chart asks for.
_VERSIONED = {
    "kubernetes": "k8s.io/kubernetes",
    "helm": "helm.sh/helm/v4",
    "kwok": "sigs.k8s.io/kwok",
    "kueue": "sigs.k8s.io/kueue",
    "coredns": "github.com/coredns/coredns",
    "netpol": "sigs.k8s.io/kube-network-policies",
}


def _version_variables(module: str, version: str) -> dict[str, str]:
    major, minor = version.removeprefix("v").split(".")[:2]
    if module == "kubernetes":
        return {
            f"{package}.{name}": value
            for package in ("k8s.io/client-go/pkg/version", "k8s.io/component-base/version")
            for name, value in {
                "gitVersion": version,
                "gitMajor": major,
                "gitMinor": minor,
                "gitCommit": "unknown",
                "gitTreeState": "clean",
            }.items()
        }
    if module == "helm":
        return {"helm.sh/helm/v4/internal/version.version": version}
    return {}


@cache
def module_version(module: str) -> str:
    """The version of the module's main requirement, as its go.mod pins it."""
    required = _VERSIONED[module]
    text = (MODULES / module / "go.mod").read_text()
    found = re.search(rf"^(?:require)?\s+{re.escape(required)} (v\S+)", text, re.MULTILINE)
    if found is None:
        raise TestbedError(f"found no requirement of {required} in {MODULES / module / 'go.mod'}")
    return found.group(1)


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pipemorph"


@cache
def _go() -> tuple[str, str, str]:
    """The go command, its version, and the platform it builds for."""
    program = shutil.which("go") or (str(GO_ELSEWHERE) if GO_ELSEWHERE.exists() else None)
    if program is None:
        raise TestbedError(
            "found no go command, needed to build the control plane: install Go 1.26 or newer, or "
            "set KUBEBUILDER_ASSETS to a folder with the programs, or PIPEMORPH_TEST_KUBECONFIG "
            "to the kubeconfig of a cluster for tests (docs/testbeds.md)"
        )
    # Inside the module: with GOTOOLCHAIN=auto its go line may choose a newer Go.
    said = output(
        [program, "-C", MODULES / "kubernetes", "env", "GOVERSION", "GOOS", "GOARCH"],
        environment={"GOWORK": "off"},
        deadline=300.0,
    ).split()
    return program, said[0], "-".join(said[1:])


def _flags(module: str) -> list[str]:
    variables = _version_variables(module, module_version(module))
    linked = " ".join(f"-X {name}={value}" for name, value in sorted(variables.items()))
    return ["-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags", f"-s -w {linked}".strip()]


def build_folder(module: str) -> Path:
    """Where the module's programs are kept: one folder per everything that can change them."""
    folder = MODULES / module
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.suffix in {".go", ".mod", ".sum"}):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    digest.update(json.dumps([_go()[1:], _flags(module)]).encode())
    return cache_root() / module / f"{module_version(module)}-{digest.hexdigest()[:12]}" / "bin"


def _assets() -> Path | None:
    named = os.environ.get("KUBEBUILDER_ASSETS")
    if not named:
        return None
    folder = Path(named)
    if not folder.is_dir():
        raise TestbedError(f"KUBEBUILDER_ASSETS={named} is no folder: correct or unset it")
    return folder


def _minor(version: str) -> tuple[int, int]:
    found = re.search(r"v(\d+)\.(\d+)", version)
    if found is None:
        raise TestbedError(f"found no version in {version!r}, expected something like v1.34.2")
    return int(found.group(1)), int(found.group(2))


@cache
def _check_skew(assets: Path) -> None:
    """Refuse the pinned controllers beside an older API server, which Kubernetes rules out."""
    found = output([assets / "kube-apiserver", "--version"]).strip()
    pinned = module_version("kubernetes")
    if _minor(found) < _minor(pinned):
        raise TestbedError(
            f"found {found} in KUBEBUILDER_ASSETS={assets} without its own kube-controller-manager "
            f"(and kube-scheduler, kubelet, kube-proxy for the node level), and those of the "
            f"pinned {pinned} must not be newer than the API server: put the matching ones into "
            f"that folder, or use assets of {pinned} or newer, or unset KUBEBUILDER_ASSETS"
        )


def _in_assets(name: str) -> Path | None:
    assets = _assets()
    if assets is None:
        return None
    if (assets / name).is_file():
        return assets / name
    if name.startswith("kube") and name != "kubectl" and (assets / "kube-apiserver").is_file():
        _check_skew(assets)
    return None


def go(*arguments: str | Path, **environment: str) -> str:
    """What a go command prints."""
    return output(
        [_go()[0], *arguments],
        environment={"GOWORK": "off", "GOFLAGS": "", **environment},
        deadline=300.0,
    )


def source(module: str) -> Path:
    """The folder of the module's main requirement as Go has it, with all its files."""
    # Downloads it if only the programs are left of an earlier build.
    found = go("-C", MODULES / module, "mod", "download", "-json", _VERSIONED[module])
    return Path(json.loads(found)["Dir"])


def find(name: str) -> Path:
    """The program, which `ensure` must have seen to before."""
    path = _in_assets(name) or build_folder(TOOLS[name].module) / name
    if not path.is_file():
        ensure([name])
    return path


def ensure(
    names: Iterable[str], say: Say | None = None, jobs: int | None = None
) -> dict[str, Path]:
    """Build what is neither the user's own nor in the cache yet, and return where each one is."""
    say = say or (lambda text: print(text, file=sys.stderr, flush=True))
    found: dict[str, Path] = {}
    wanted: dict[str, list[str]] = {}
    for name in names:
        own = _in_assets(name)
        if own is not None:
            found[name] = own
            continue
        found[name] = build_folder(TOOLS[name].module) / name
        if not found[name].is_file():
            wanted.setdefault(TOOLS[name].module, []).append(name)
    for module, missing in wanted.items():
        _build(module, missing, say, jobs)
    return found


@contextmanager
def locked(path: Path, say: Say, deadline: float) -> Iterator[None]:
    """Hold a lock between test runs; the kernel releases it when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:

        def take() -> bool:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise NotYet(f"another test run holds {path}") from None
            return True

        try:
            take()
        except NotYet:
            say(f"another test run is building (it holds {path}): waiting for it")
            wait_for("the programs of the test cluster", take, deadline, interval=1.0)
        yield


def _build(module: str, names: list[str], say: Say, jobs: int | None) -> None:
    program, version, platform = _go()
    folder = build_folder(module)
    end = time.monotonic() + BUILD_DEADLINE
    with locked(folder.parent.parent / "lock", say, BUILD_DEADLINE):
        scratch = folder.parent / "building"
        # Left there by a run that was killed: we hold the lock, so nobody works in it.
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        folder.mkdir(exist_ok=True)
        for name in names:
            if (folder / name).is_file():
                continue  # the run we waited for built it
            command = [program, "-C", str(MODULES / module), "build", *_flags(module)]
            command += ["-p", str(jobs or max(2, (os.cpu_count() or 2) // 2))]
            command += ["-o", str(scratch / name), TOOLS[name].package]
            nice = shutil.which("nice")
            title = (
                f"{name} (of {_VERSIONED[module]} {module_version(module)}, {version} {platform})"
            )
            say(f"building {title}, once on this machine, into {folder}")
            start = time.monotonic()
            child = Process(
                f"the build of {name}",
                [nice, "-n", "10", *command] if nice else command,
                scratch / f"{name}.log",
                # The user's own GOFLAGS or workspace must not change what is built.
                environment={"CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"},
            )
            child.start()
            try:
                watch(child, title, say, start, end)
                if child.returncode != 0:
                    raise TestbedError(f"cannot build {title}: {child.log_end(30)}")
            finally:
                child.stop(grace=1.0)
            # A rename is all or nothing: no run ever sees half a program.
            (scratch / name).rename(folder / name)
            say(f"built {title} in {time.monotonic() - start:.0f} s")
        shutil.rmtree(scratch, ignore_errors=True)


def watch(child: Process, title: str, say: Say, start: float, end: float) -> None:
    """Wait for the end of a build that began at `start`, with a word now and then, until `end`."""
    next_word = start + SAY_EVERY

    def ended() -> bool:
        nonlocal next_word
        now = time.monotonic()
        if now >= next_word:
            say(f"still building {title}: {now - start:.0f} s")
            next_word = now + SAY_EVERY
        return not child.running

    wait_for(
        f"the build of {title}",
        ended,
        end - start,
        interval=0.5,
        details=child.log_end,
        patient=False,
    )
