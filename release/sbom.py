"""Bill of materials of a release, in SPDX JSON.

It lists the built packages, the libraries that are compiled into the wheels, and the packages that
the images' locks name, each with the hashes that pip accepts.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from spdx_tools.spdx.model import (
    Actor,
    ActorType,
    Checksum,
    ChecksumAlgorithm,
    CreationInfo,
    Document,
    ExternalPackageRef,
    ExternalPackageRefCategory,
    Package,
    Relationship,
    RelationshipType,
    SpdxNoAssertion,
)
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document
from spdx_tools.spdx.writer.write_anything import write_file

LINKED = ("nanobind", "ziglang")
"""Packages of which the compiled modules hold code: the binding, and the C++ library."""
PIN = re.compile(r"^([\w.-]+)==(\S+)(?: ; [^\\\n]*)? \\$", re.MULTILINE)


def write_sbom(path: Path, version: str, built: Sequence[Path], locks: Mapping[str, Path]) -> None:
    """Write the bill of ``built`` files and of ``locks``, by the extra that each is for. Raises
    ValueError if the document breaks a rule of SPDX."""
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in built}
    main = Package(
        spdx_id="SPDXRef-pipemorph",
        name="pipemorph",
        version=version,
        download_location=SpdxNoAssertion(),
        files_analyzed=False,
        external_references=[_purl("pipemorph", version)],
    )
    packages = {main.spdx_id: main}
    relationships = [Relationship("SPDXRef-DOCUMENT", RelationshipType.DESCRIBES, main.spdx_id)]
    for name, digest in digests.items():
        file = Package(
            spdx_id=_identify(name),
            name="pipemorph",
            version=version,
            file_name=name,
            download_location=SpdxNoAssertion(),
            files_analyzed=False,
            checksums=[Checksum(ChecksumAlgorithm.SHA256, digest)],
        )
        packages[file.spdx_id] = file
        relationships.append(Relationship(file.spdx_id, RelationshipType.VARIANT_OF, main.spdx_id))
    for name in LINKED:
        linked = _package(name, metadata.version(name))
        packages[linked.spdx_id] = linked
        relationships.append(
            Relationship(main.spdx_id, RelationshipType.STATIC_LINK, linked.spdx_id)
        )
    for extra, lock in locks.items():
        for package in read_lock(lock):
            packages[package.spdx_id] = package
            relationships.append(
                Relationship(
                    main.spdx_id,
                    RelationshipType.DEPENDS_ON,
                    package.spdx_id,
                    comment=f"in the lock {extra}",
                )
            )
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH") or datetime.now(UTC).timestamp())
    identity = uuid.uuid5(uuid.NAMESPACE_URL, "".join(sorted(digests.values())))
    document = Document(
        CreationInfo(
            spdx_version="SPDX-2.3",
            spdx_id="SPDXRef-DOCUMENT",
            name=f"pipemorph-{version}",
            document_namespace=f"https://spdx.org/spdxdocs/pipemorph-{version}-{identity}",
            creators=[Actor(ActorType.ORGANIZATION, "The PipeMorph contributors")],
            created=datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None),
        ),
        packages=list(packages.values()),
        relationships=relationships,
    )
    if faults := validate_full_spdx_document(document):
        raise ValueError("; ".join(fault.validation_message for fault in faults))
    write_file(document, str(path), validate=False)


def read_lock(lock: Path) -> Iterator[Package]:
    """Read the packages of a file of ``uv pip compile --generate-hashes``."""
    text = lock.read_text()
    pins = [*PIN.finditer(text)]
    ends = [pin.start() for pin in pins[1:]] + [len(text)]
    for pin, end in zip(pins, ends, strict=True):
        hashes = re.findall(r"--hash=sha256:(\w+)", text[pin.end() : end])
        yield _package(pin[1], pin[2], hashes)


def _package(name: str, version: str, hashes: Iterable[str] = ()) -> Package:
    files = ", ".join(hashes)
    return Package(
        spdx_id=_identify(f"{name}-{version}"),
        name=name,
        version=version,
        download_location=SpdxNoAssertion(),
        files_analyzed=False,
        external_references=[_purl(name, version)],
        # A package has a file for each platform, so no one checksum of its own.
        comment=f"sha256 of the files that the lock accepts: {files}" if files else None,
    )


def _identify(name: str) -> str:
    return "SPDXRef-" + re.sub(r"[^A-Za-z0-9.]+", "-", name)


def _purl(name: str, version: str) -> ExternalPackageRef:
    return ExternalPackageRef(
        ExternalPackageRefCategory.PACKAGE_MANAGER, "purl", f"pkg:pypi/{name}@{version}"
    )
