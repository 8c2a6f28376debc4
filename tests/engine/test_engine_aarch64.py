"""Code that depends on the processor, on aarch64: cross-compiled, run by QEMU's emulation.

Emulated are the instructions, among them the one for a CRC32C. Memory is ordered as the machine
below orders it, and the kernel is that machine's.
"""

import re

import pytest
from suite_build import ROOT, run
from testbed.unpacked import libcrypto_folder

TESTBEDS = ("aarch64",)
TARGET = "aarch64-linux-gnu"
SOURCES = [
    *("csrc/crypto/aes_gcm.cpp", "csrc/crypto/crc32c.cpp", "csrc/crypto/hmac.cpp"),
    *("csrc/crypto/library.cpp", "csrc/wire/payload_guard.cpp"),
    *("csrc/os/copy.cpp", "csrc/wire/chunk.cpp", "csrc/wire/frames.cpp"),
    *("csrc/wire/handshake.cpp", "csrc/wire/mac.cpp", "tests/engine/main.cpp"),
    *(f"tests/engine/{what}_test.cpp" for what in ("crypto", "handshake", "mac", "wire")),
]
FLAGS = ("-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-Icsrc", "-Itests/engine")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_crypto_and_wire_on_an_emulated_aarch64(tmp_path):
    program = tmp_path / "tests"
    run(f"{TARGET}-g++", *FLAGS, *SOURCES, "-o", program, "-ldl", cwd=ROOT)
    libraries = f"LD_LIBRARY_PATH=/usr/{TARGET}/lib:{libcrypto_folder()}"
    said = run("qemu-aarch64-static", "-L", f"/usr/{TARGET}", "-E", libraries, program, cwd=ROOT)
    ran = re.search(r"^(\d+) ran, 0 failed$", said, re.MULTILINE)
    assert ran and int(ran[1]) > 25, said
    # The instruction, not the table that every processor can use.
    assert "crc32c by the processor's instruction" in said, said
