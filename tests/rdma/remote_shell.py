"""A remote shell between guests, which have no ssh. ``--listen ADDRESS`` on the one, and on the
other ``HOST COMMAND…``, which runs this interpreter's `pipemorph` there."""

import json
import shutil
import socket
import subprocess
import sys
import threading

PORT = 29610


def listen(address: str) -> int:
    with socket.create_server((address, PORT)) as server:
        print(json.dumps("listening"), flush=True)
        stream, _ = server.accept()
    with stream, stream.makefile("rb", buffering=0) as lines:
        _, *arguments = json.loads(lines.readline())
        command = [sys.executable, "-m", "pipemorph.cli", *arguments]
        return subprocess.run(command, stdin=stream, stdout=stream, check=False).returncode


def connect(host: str, command: list[str]) -> int:
    stream = socket.create_connection((host, PORT), timeout=60.0)
    stream.settimeout(None)
    stream.sendall(json.dumps(command).encode() + b"\n")

    def forward() -> None:
        with stream.makefile("wb", buffering=0) as out:
            shutil.copyfileobj(sys.stdin.buffer.raw, out)  # type: ignore[attr-defined]
        stream.shutdown(socket.SHUT_WR)

    threading.Thread(target=forward, daemon=True).start()
    while data := stream.recv(1 << 16):
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    first, *rest = sys.argv[1:]
    sys.exit(listen(*rest) if first == "--listen" else connect(first, rest))
