"""Container images made from files on this machine, without a registry or a builder."""

import gzip
import hashlib
import io
import json
import platform
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed.errors import TestbedError
from testbed.processes import run

# A host that cannot exist: a pull that should not happen fails at once.
HOST = "testbed.invalid"
BASE = f"{HOST}/base:1"
PAUSE = f"{HOST}/pause:1"

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def build_image(
    archive: Path,
    name: str,
    *,
    files: Mapping[str, Path | bytes],
    links: Mapping[str, str] | None = None,
    directories: Sequence[str] = (),
    command: Sequence[str],
    user: str = "",
) -> Path:
    """Write an OCI image of one layer as a tar archive that `ctr images import` takes.

    `files` maps a path in the image to its content; all are executable, which does no harm.
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for path in directories:
            entry = tarfile.TarInfo(path)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            tar.addfile(entry)
        for path, content in files.items():
            data = content if isinstance(content, bytes) else content.read_bytes()
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, io.BytesIO(data))
        for path, target in (links or {}).items():
            entry = tarfile.TarInfo(path)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    plain = layer.getvalue()
    packed = gzip.compress(plain, compresslevel=1, mtime=0)
    config = {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Cmd": list(command), "Env": ["PATH=/bin:/usr/bin"], "User": user},
        "rootfs": {"type": "layers", "diff_ids": [_digest(plain)]},
    }
    blobs: dict[str, bytes] = {}

    def blob(data: bytes, media_type: str) -> dict[str, Any]:
        blobs[_digest(data)] = data
        return {"mediaType": media_type, "digest": _digest(data), "size": len(data)}

    oci = "application/vnd.oci.image"
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{oci}.manifest.v1+json",
        "config": blob(json.dumps(config).encode(), f"{oci}.config.v1+json"),
        "layers": [blob(packed, f"{oci}.layer.v1.tar+gzip")],
    }
    described = blob(json.dumps(manifest).encode(), f"{oci}.manifest.v1+json")
    described["annotations"] = {"io.containerd.image.name": name}
    index = {"schemaVersion": 2, "mediaType": f"{oci}.index.v1+json", "manifests": [described]}
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w") as tar:
        content_of = {
            "oci-layout": json.dumps({"imageLayoutVersion": "1.0.0"}).encode(),
            "index.json": json.dumps(index).encode(),
        } | {f"blobs/sha256/{digest.removeprefix('sha256:')}": d for digest, d in blobs.items()}
        for path, data in content_of.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    return archive


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def base_images(directory: Path) -> list[Path]:
    """The image of test pods, and that of the container which holds each pod's namespaces.

    busybox for everything small; bash and getent with their libraries, because a static program
    cannot look up names in an image that has no C library.
    """
    busybox = Path("/bin/busybox")
    if _libraries(busybox):
        raise TestbedError(
            f"found a {busybox} that needs libraries, which the pause image has not: install "
            "the static one (Debian: apt-get install busybox-static)"
        )
    applets = ["cat", "echo", "env", "false", "httpd", "head", "ip", "ls", "mkdir", "nc", "ping"]
    applets += ["sh", "sleep", "timeout", "true", "wc"]
    programs = {f"bin/{name}": _program(name) for name in ("bash", "getent")}
    libraries = {library for program in programs.values() for library in _libraries(program)}
    base = build_image(
        directory / "base.tar",
        BASE,
        files={
            "bin/busybox": busybox,
            "etc/nsswitch.conf": b"hosts: files dns\n",
            **programs,
            **{str(library).lstrip("/"): library for library in libraries},
        },
        links={f"bin/{applet}": "busybox" for applet in applets},
        directories=["tmp"],
        command=["/bin/sleep", "2147483647"],
    )
    pause = build_image(
        directory / "pause.tar",
        PAUSE,
        files={"bin/busybox": busybox},
        command=["/bin/busybox", "sleep", "2147483647"],
    )
    return [base, pause]


def _program(name: str) -> Path:
    found = shutil.which(name)
    if found is None:
        raise TestbedError(f"found no program {name} for the image of test pods: install it")
    return Path(found)


def _libraries(program: Path) -> set[Path]:
    """The files a program needs to start, its loader among them; none if it is static."""
    said = run(["ldd", program]).stdout
    return {Path(word) for word in said.split() if word.startswith("/") and ".so" in word}
