"""Keys and certificates of a test cluster: P-256, which takes a millisecond to make."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from testbed.errors import TestbedError

# Long enough for a cluster that stays open over a few days, no longer.
LIFETIME = timedelta(days=30)
# A certificate must be valid on a machine whose clock is a little behind this one's.
CLOCK_DIFFERENCE = timedelta(minutes=5)


class KeyPair(NamedTuple):
    """The PEM files of a certificate and of its private key."""

    certificate: Path
    key: Path


def make_key(path: Path) -> Path:
    """Write a new private key, for signing tokens or certificates."""
    private = ec.generate_private_key(ec.SECP256R1())
    path.touch(mode=0o600)
    path.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return path


def load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a private key. Raises TestbedError for a key of another kind."""
    key = load_pem_private_key(path.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TestbedError(f"{path} holds a {type(key).__name__}; expected an elliptic curve key")
    return key


def make_public_key(private: Path, path: Path) -> Path:
    """Write the public half of a private key."""
    public = load_key(private).public_key()
    path.write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return path


def sign_es256(key: Path, data: bytes) -> bytes:
    """The signature of a JSON web token: r and s, 32 bytes each."""
    r, s = decode_dss_signature(load_key(key).sign(data, ec.ECDSA(SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def make_self_signed(
    pair: KeyPair, common_name: str, hosts: Sequence[str] = (), *, may_sign: bool = False
) -> KeyPair:
    """Write a certificate that is its own authority, and its key; `may_sign`: others, too."""
    key = load_key(make_key(pair.key))
    subject = _subject(common_name)
    builder = (
        _builder(subject, subject, key.public_key(), hosts)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if may_sign:
        builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    pair.certificate.write_bytes(builder.sign(key, SHA256()).public_bytes(Encoding.PEM))
    return pair


class Authority:
    """The certificate authority of one test cluster."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
        self.pair = make_self_signed(
            KeyPair(directory / "ca.crt", directory / "ca.key"), "pipemorph-testbed", may_sign=True
        )

    def issue(
        self,
        file_name: str,
        common_name: str,
        *,
        groups: Sequence[str] = (),
        hosts: Sequence[str] = (),
    ) -> KeyPair:
        """A certificate for a client (a user in `groups`) and, when it has `hosts`, a server."""
        pair = KeyPair(self.directory / f"{file_name}.crt", self.directory / f"{file_name}.key")
        public = load_key(make_key(pair.key)).public_key()
        authority = x509.load_pem_x509_certificate(self.pair.certificate.read_bytes())
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if hosts:
            purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
        issued = (
            _builder(_subject(common_name, groups), authority.subject, public, hosts)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(_key_identifier(authority), critical=False)
            .sign(load_key(self.pair.key), SHA256())
        )
        pair.certificate.write_bytes(issued.public_bytes(Encoding.PEM))
        return pair


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, hosts: Sequence[str]
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_DIFFERENCE)
        .not_valid_after(now + LIFETIME)
    )
    if not hosts:
        return builder
    names = x509.SubjectAlternativeName([_host_name(host) for host in hosts])
    return builder.add_extension(names, critical=False)


def _subject(common_name: str, groups: Sequence[str] = ()) -> x509.Name:
    organizations = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*organizations, x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_identifier(authority: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    subject = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(subject)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
