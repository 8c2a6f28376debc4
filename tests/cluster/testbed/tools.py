"""The programs of a test cluster, built from the Go modules in `tests/cluster/tools`.

`make testbeds` fills `~/.cache/pipemorph/<module>/<key>/bin` with them.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from testbed.errors import TestbedError
from testbed.processes import output
from testbed.steps import Say, run_step
from testbed.waiting import NotYet, wait_for

MODULES = Path(__file__).resolve().parent.parent / "tools"
# Folder of Go's own archive, on the PATH of a login shell only.
GO_ELSEWHERE = Path("/usr/local/go/bin/go")


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
    "kueue": Tool("kueue", "sigs.k8s.io/kueue/cmd/kueue"),
}
# The programs of each testbed.
PROGRAMS = {
    "api": ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl", "helm"),
    "kueue": ("kueue",),
    "nodes": ("kube-scheduler", "kube-proxy", "kubelet", "device-plugin", "coredns", "netpol"),
}

# The module whose version names a build, and where it wants that version linked in. An API server
# that calls itself v0.0.0 fails every `kubeVersion` a chart asks for.
_VERSIONED = {
    "kubernetes": "k8s.io/kubernetes",
    "helm": "helm.sh/helm/v4",
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


def program_version(name: str) -> str:
    """The version of a program, as its module's go.mod pins it."""
    tool = TOOLS[name]
    if tool.package.startswith("."):
        return module_version(tool.module)
    text = (MODULES / tool.module / "go.mod").read_text()
    pinned: dict[str, str] = dict(re.findall(r"^(?:require)?\s+(\S+) (v\S+)", text, re.MULTILINE))
    # A module's path may begin with that of another one.
    module = max((m for m in pinned if f"{tool.package}/".startswith(f"{m}/")), key=len)
    return pinned[module]


def cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pipemorph"


@cache
def _go() -> tuple[str, str, str]:
    """The go command, its version, and the platform it builds for."""
    program = shutil.which("go") or (str(GO_ELSEWHERE) if GO_ELSEWHERE.exists() else None)
    if program is None:
        raise TestbedError(
            "found no go command to build the control plane: install Go 1.26 or newer "
            "(docs/testbeds.md)"
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
    """Folder of the module's programs: one folder for each set of what can change them."""
    folder = MODULES / module
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.suffix in {".go", ".mod", ".sum"}):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    digest.update(json.dumps([_go()[1:], _flags(module)]).encode())
    return cache_root() / module / f"{module_version(module)}-{digest.hexdigest()[:12]}" / "bin"


# Go must not download what `make testbeds` has not downloaded. Its checksum database does not have
# every release; callers compare checksums themselves.
NO_DOWNLOAD = {"GOPROXY": "off", "GONOSUMDB": "*"}


def go(*arguments: str | Path, **environment: str) -> str:
    """Output of a go command."""
    return output(
        [_go()[0], *arguments],
        environment={"GOWORK": "off", "GOFLAGS": "", **environment},
        deadline=300.0,
    )


def main_requirement(module: str) -> str:
    """The module's main requirement with its version, as `go mod download` takes it."""
    return f"{_VERSIONED[module]}@{module_version(module)}"


@cache
def _go_modules() -> Path:
    return Path(go("env", "GOMODCACHE").strip())


def has_source(requirement: str) -> bool:
    """True if Go's module cache holds `MODULE@VERSION`."""
    return (_go_modules() / requirement).is_dir()


def download_command(requirement: str) -> list[str]:
    """The command that downloads `MODULE@VERSION` into Go's module cache."""
    return [_go()[0], "mod", "download", "-json", requirement]


def source(requirement: str, testbed: str) -> tuple[Path, str]:
    """The folder of `MODULE@VERSION` in Go's module cache, and its checksum.

    Raises TestbedError, which names the testbed, if it is not there.
    """
    if not has_source(requirement):
        raise not_ready(testbed, f"the source of {requirement} is missing")
    found = json.loads(go("mod", "download", "-json", requirement, **NO_DOWNLOAD))
    return Path(found["Dir"]), found["Sum"]


def not_ready(testbed: str, why: str) -> TestbedError:
    """The error of a test that needs a testbed which `make testbeds` has not built."""
    return TestbedError(f"testbed {testbed} is not ready: {why}; run `make testbeds`")


def located(name: str) -> Path:
    """Path of the program, or its path once it is built."""
    return build_folder(TOOLS[name].module) / name


def find(name: str) -> Path:
    """The program. Raises TestbedError if it is not built."""
    path = located(name)
    if not path.is_file():
        testbed = next(bed for bed, names in PROGRAMS.items() if name in names)
        raise not_ready(testbed, f"{name} {program_version(name)} is not built")
    return path


@contextmanager
def locked(path: Path, say: Say, deadline: float, *, patient: bool = True) -> Iterator[None]:
    """Hold a lock between processes; the kernel releases it when its holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:

        def take() -> bool:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise NotYet(f"another process holds {path}") from None
            return True

        try:
            take()
        except NotYet:
            say(f"another process builds here: waiting until it releases {path}")
            wait_for("the other build", take, deadline, interval=1.0, patient=patient)
        yield


def build(name: str, say: Say, end: float) -> None:
    """Build the program into the cache, unless it is there.

    `end` is a time of `time.monotonic`. Raises LimitReached then, and TestbedError with the
    compiler's output if the build fails.
    """
    module = TOOLS[name].module
    program, version, platform = _go()
    folder = build_folder(module)
    lock = folder.parent.parent / "lock"
    with locked(lock, say, end - time.monotonic(), patient=False):
        if (folder / name).is_file():
            return  # the process that held the lock built it
        scratch = folder.parent / "building"
        # Of a killed process: this one holds the lock, so no other works in it.
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        folder.mkdir(exist_ok=True)
        command: list[str | Path] = [program, "-C", MODULES / module, "build", *_flags(module)]
        command += ["-o", scratch / name, TOOLS[name].package]
        run_step(
            f"building {name} {program_version(name)} ({version} {platform})",
            command,
            scratch / f"{name}.log",
            say,
            end,
            # The user's own GOFLAGS or workspace must not change what is built.
            environment={"CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"},
        )
        # A rename is all or nothing: no process ever sees half a program.
        (scratch / name).rename(folder / name)
        shutil.rmtree(scratch, ignore_errors=True)
