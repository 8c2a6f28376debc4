"""Self-signed certificates for servers that tests start on this machine."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from testbed.pki import KeyPair, make_self_signed


def self_signed(folder: Path, *hosts: str, name: str = "tls") -> KeyPair:
    """``NAME.crt``, a certificate for ``hosts`` that is its own authority, and ``NAME.key``.

    A host is an IP address or a DNS name; without any: 127.0.0.1 and localhost.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pair = KeyPair(folder / f"{name}.crt", folder / f"{name}.key")
    return make_self_signed(pair, name, hosts or ("127.0.0.1", "localhost"))


def is_issued_by(certificate: str, authorities: str) -> bool:
    """True if one of the authorities signed the certificate. Both are PEM texts."""
    issued = x509.load_pem_x509_certificate(certificate.encode())
    for authority in x509.load_pem_x509_certificates(authorities.encode()):
        try:
            issued.verify_directly_issued_by(authority)
        except (ValueError, InvalidSignature):
            continue
        return True
    return False
