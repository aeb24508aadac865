"""Why a connection in TLS failed, and what to do: OpenSSL's own texts name lines of its source, and nothing to do.

*Source:* OpenSSL `include/openssl/x509_vfy.h.in` (codes of a refused certificate), `sslerr.h` (reasons), RFC 8446,
section 6.2 (alerts).
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Final

from ncclscope_agent.credentials import Credentials

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


def closed_unheard(credentials: Credentials) -> str:
    """What a service may want that closes the connection before its first word: the end of a sentence, or nothing."""
    if not credentials.is_encrypted:
        return ": does it want TLS (--tls-ca FILE)?"
    if not credentials.tls_cert:
        return ": does it want a certificate of this node (--tls-cert FILE)?"
    return ": does it know who signed this node's certificate (--tls-cert)?"


def tls_sentence(error: BaseException) -> str | None:
    """What failed and what to do; None where it is no error of TLS that this knows better than its own text."""
    if isinstance(error, ssl.SSLCertVerificationError):
        said = error.verify_message.removesuffix(".")
        return f"the service's certificate is refused: {said}; {_ADVICE.get(error.verify_code, _WHO_SIGNED)}"
    return _REASONS.get(error.reason or "") if isinstance(error, ssl.SSLError) else None
