"""Keys and certificates of a test cluster, by the openssl command.

The command rather than a Python package: it is on every machine that can clone the repository,
and the tests need no other dependency.
"""

import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from testbed.processes import output

# Long enough for a cluster that somebody leaves open over a few days, no longer.
DAYS = 30


@dataclass(frozen=True)
class KeyPair:
    certificate: Path
    key: Path


def make_key(path: Path) -> Path:
    """A private key for signing tokens or certificates: P-256, made in a millisecond."""
    output(
        [
            "openssl",
            "genpkey",
            "-algorithm",
            "EC",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-out",
            path,
        ]
    )
    path.chmod(0o600)
    return path


def make_public_key(private: Path, path: Path) -> Path:
    output(["openssl", "pkey", "-in", private, "-pubout", "-out", path])
    return path


def sign_es256(key: Path, data: bytes) -> bytes:
    """The signature of a JSON web token: r and s, 32 bytes each, out of openssl's DER."""
    with tempfile.TemporaryDirectory() as folder:
        message, signature = Path(folder, "message"), Path(folder, "signature")
        message.write_bytes(data)
        output(["openssl", "dgst", "-sha256", "-sign", key, "-out", signature, message])
        der = signature.read_bytes()
    # SEQUENCE { INTEGER r, INTEGER s }, every length below 128.
    numbers, position = [], 2
    for _ in range(2):
        length = der[position + 1]
        numbers.append(int.from_bytes(der[position + 2 : position + 2 + length], "big"))
        position += 2 + length
    return b"".join(number.to_bytes(32, "big") for number in numbers)


class Authority:
    """The certificate authority of one test cluster."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
        self.pair = KeyPair(directory / "ca.crt", make_key(directory / "ca.key"))
        # A file of our own: the system's configuration may add extensions of its own.
        config = directory / "ca.cnf"
        config.write_text(
            "[req]\ndistinguished_name=dn\nx509_extensions=ca\nprompt=no\n"
            "[dn]\nCN=pipemorph-testbed\n"
            "[ca]\nbasicConstraints=critical,CA:TRUE\nkeyUsage=critical,keyCertSign,cRLSign\n"
            "subjectKeyIdentifier=hash\n"
        )
        signed = ["-x509", "-new", "-days", str(DAYS), "-out", str(self.pair.certificate)]
        output(["openssl", "req", "-key", self.pair.key, "-config", config, *signed])

    def issue(
        self,
        file_name: str,
        common_name: str,
        *,
        groups: Sequence[str] = (),
        hosts: Sequence[str] = (),
    ) -> KeyPair:
        """A certificate for a client (a user in `groups`) and, when it has `hosts`, a server."""
        key = make_key(self.directory / f"{file_name}.key")
        certificate = self.directory / f"{file_name}.crt"
        subject = "".join(f"{n}.O={group}\n" for n, group in enumerate(groups))
        request = self.directory / f"{file_name}.cnf"
        request.write_text(
            f"[req]\ndistinguished_name=dn\nprompt=no\n[dn]\n{subject}CN={common_name}\n"
        )
        usage = "clientAuth,serverAuth" if hosts else "clientAuth"
        extensions = self.directory / f"{file_name}.ext"
        extensions.write_text(
            "basicConstraints=critical,CA:FALSE\n"
            "keyUsage=critical,digitalSignature\n"
            f"extendedKeyUsage={usage}\n" + _alternative_names(hosts)
        )
        signing = output(["openssl", "req", "-new", "-key", key, "-config", request])
        signer = ["-CA", str(self.pair.certificate), "-CAkey", str(self.pair.key)]
        chosen = ["-set_serial", str(secrets.randbits(64)), "-days", str(DAYS)]
        chosen += ["-extfile", str(extensions)]
        output(["openssl", "x509", "-req", *signer, *chosen, "-out", certificate], input=signing)
        return KeyPair(certificate, key)


def _alternative_names(hosts: Sequence[str]) -> str:
    if not hosts:
        return ""
    names = []
    for host in hosts:
        try:
            ip_address(host)
            names.append(f"IP:{host}")
        except ValueError:
            names.append(f"DNS:{host}")
    return f"subjectAltName={','.join(names)}\n"
