"""How the agent proves who it is, and how it knows the service: TLS and a token, out of files.

The files are read again for every connection, so what was renewed is used without a restart. Of a connection that
failed it says what to do: OpenSSL's own texts name lines of its source.

*Source:* OpenSSL `include/openssl/x509_vfy.h.in` (codes of a refused certificate), `sslerr.h` (reasons), RFC 8446,
section 6.2 (alerts).
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ncclscope_wire.errors import ConfigError

_MOST_TOKEN_BYTES: Final = 4096
"""Longest file with a token."""
_NOT_YET_VALID, _EXPIRED, _WRONG_NAME, _WRONG_ADDRESS = 9, 10, 62, 64
_ADVICE: Final[Mapping[int, str]] = {
    _NOT_YET_VALID: "is this node's clock right?",
    _EXPIRED: "the service needs a new one, or this node's clock is wrong",
    _WRONG_NAME: "connect by a name that is in it, or say which one with --tls-server-name",
    _WRONG_ADDRESS: "connect by a name or address that is in it, or say which one with --tls-server-name",
}
_WHO_SIGNED: Final = "--tls-ca names who may sign it"
_WANTS_CERTIFICATE: Final = "the service wants a certificate of this node: --tls-cert FILE, of a signer that it knows"
_REASONS: Final[Mapping[str, str]] = {
    "WRONG_VERSION_NUMBER": "the service does not speak TLS on this port",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": _WANTS_CERTIFICATE,
    "SSLV3_ALERT_HANDSHAKE_FAILURE": _WANTS_CERTIFICATE,
    "TLSV1_ALERT_UNKNOWN_CA": "the service does not know who signed this node's certificate (--tls-cert)",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "this node's certificate (--tls-cert) has expired",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Which files hold what; without any, neither TLS nor token."""

    tls: bool = False
    """Speak TLS; the system's certificate authorities are trusted if `tls_ca` is empty."""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    server_name: str = ""
    """The name in the service's certificate; empty: the host that is connected to."""
    token_file: str = ""

    @property
    def is_encrypted(self) -> bool:
        """Whether the connection is TLS."""
        return self.tls or bool(self.tls_ca or self.tls_cert)

    def check(self) -> None:
        """Reads all files once, so that the agent does not start if one is wrong.

        Raises:
            ConfigError: as `context` and `token`.
        """
        self.context()
        self.token()

    def context(self) -> ssl.SSLContext | None:
        """How to speak TLS, from the files as they are now; None without TLS.

        Raises:
            ConfigError: a file cannot be read or is not what it should be.
        """
        if not self.is_encrypted:
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca or None)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--tls-ca {self.tls_ca}: {_why(error)}: name a PEM file of certificates") from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.tls_cert:
            try:
                context.load_cert_chain(self.tls_cert, self.tls_key or None)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(
                    f"--tls-cert {self.tls_cert}: {_why(error)}: name a PEM certificate, and its key with --tls-key"
                ) from error
        return context

    def token(self) -> str:
        """The token, from the file as it is now: its first line that is neither empty nor a remark; "" without a file.

        Raises:
            ConfigError: the file cannot be read or holds none.
        """
        if not self.token_file:
            return ""
        try:
            with Path(self.token_file).open("rb") as stream:
                text = stream.read(_MOST_TOKEN_BYTES).decode("ascii", "replace")
        except OSError as error:
            raise ConfigError(f"--token-file {self.token_file}: {_why(error)}") from error
        for line in text.splitlines():
            words = line.split()
            if words and not words[0].startswith("#"):
                return words[0]
        raise ConfigError(f"--token-file {self.token_file}: there is no token in it")


def _why(error: OSError) -> str:
    """The reason alone; the text of an ssl.SSLError is long and names OpenSSL's source."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no certificate or key").lower().replace("_", " ")
    return error.strerror or type(error).__name__


def closed_unheard(credentials: Credentials) -> str:
    """The end of a sentence: what a service may want that closes the connection before its first word."""
    if not credentials.is_encrypted:
        return ": does it want TLS (--tls-ca FILE)?"
    if not credentials.tls_cert:
        return ": does it want a certificate of this node (--tls-cert FILE)?"
    return ": does it know who signed this node's certificate (--tls-cert)?"


def tls_sentence(error: BaseException) -> str | None:
    """A sentence: what failed and what to do. None if it is no error of TLS, or its own text says as much."""
    if isinstance(error, ssl.SSLCertVerificationError):
        said = error.verify_message.removesuffix(".")
        return f"the service's certificate is refused: {said}; {_ADVICE.get(error.verify_code, _WHO_SIGNED)}"
    return _REASONS.get(error.reason or "") if isinstance(error, ssl.SSLError) else None
