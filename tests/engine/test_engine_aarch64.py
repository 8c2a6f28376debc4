"""What depends on the processor, on aarch64: built by a cross compiler, run by QEMU's emulation.

Emulated are the instructions, among them the one for a CRC32C. Memory is ordered as the machine
below orders it, and the kernel is that machine's.
"""

import pathlib
import re
import subprocess

import pytest
from test_engine_cpp import ROOT, run
from testbed import packages
from testbed.processes import output
from testbed.tools import cache_root, locked

TARGET = "aarch64-linux-gnu"
PROGRAMS = {
    f"/usr/bin/{TARGET}-g++": f"g++-{TARGET}",
    "/usr/bin/qemu-aarch64-static": "qemu-user-static",
}
SOURCES = [
    *("csrc/crypto/aes_gcm.cpp", "csrc/crypto/crc32c.cpp", "csrc/crypto/hmac.cpp"),
    *("csrc/crypto/library.cpp", "csrc/wire/payload_guard.cpp"),
    *("csrc/os/copy.cpp", "csrc/wire/chunk.cpp", "csrc/wire/frames.cpp"),
    *("csrc/wire/handshake.cpp", "csrc/wire/seal.cpp", "tests/engine/main.cpp"),
    *(f"tests/engine/{what}_test.cpp" for what in ("crypto", "handshake", "seal", "wire")),
]
FLAGS = ("-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-Icsrc", "-Itests/engine")


def libcrypto() -> pathlib.Path:
    """The folder of Debian's libcrypto for aarch64, which no package for amd64 brings. It is
    unpacked into the cache, and apt and dpkg of this machine stay as they are."""
    root = cache_root() / TARGET
    folder = root / "root/usr/lib" / TARGET
    with locked(root.with_suffix(".lock"), print, 600.0):
        if not (folder / "libcrypto.so.3").exists():
            for part in ("lists/partial", "cache/archives/partial"):
                (root / part).mkdir(parents=True, exist_ok=True)
            apt = [
                "apt-get",
                "-q",
                "-o",
                "APT::Architecture=arm64",
                "-o",
                "APT::Architectures=arm64",
            ]
            apt += ["-o", f"Dir::State::Lists={root}/lists", "-o", f"Dir::Cache={root}/cache"]
            apt += ["-o", "Dir::State::status=/dev/null", "-o", "APT::Sandbox::User=root"]
            output([*apt, "update"], deadline=300)
            done = subprocess.run(
                [*apt, "download", "libssl3"], cwd=root, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            [package] = root.glob("libssl3_*_arm64.deb")
            output(["dpkg-deb", "-x", str(package), str(root / "root")], deadline=60)
            package.unlink()
    return folder


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_crypto_and_wire_on_an_emulated_aarch64(tmp_path):
    packages.need(PROGRAMS, print)
    program = tmp_path / "tests"
    run(f"{TARGET}-g++", *FLAGS, *SOURCES, "-o", program, "-ldl", cwd=ROOT)
    libraries = f"LD_LIBRARY_PATH=/usr/{TARGET}/lib:{libcrypto()}"
    said = run("qemu-aarch64-static", "-L", f"/usr/{TARGET}", "-E", libraries, program, cwd=ROOT)
    ran = re.search(r"^(\d+) ran, 0 failed$", said, re.MULTILINE)
    assert ran and int(ran[1]) > 25, said
    # By the instruction, not by the table that every processor can use.
    assert "crc32c by the processor's instruction" in said, said
