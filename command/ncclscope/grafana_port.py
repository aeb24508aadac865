"""The few calls to Grafana's HTTP API that ncclscope makes, over grafana-api as transport.

grafana-api brings the session, the token and the errors; its own methods know neither data sources by uid nor alerting,
and it fails on answers without a body (204), so only its raw verbs are used, behind this port.
Source: Grafana documentation, "HTTP API reference"; statuses as in grafana-openapi-client-go for version 13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from ncclscope_wire.errors import NcclscopeError

_PATIENCE_SECONDS: Final = 30.0

_HEADERS: Final = {"X-Disable-Provenance": "true"}
"""Keeps what is pushed editable in Grafana."""


class GrafanaError(NcclscopeError):
    """Grafana cannot be reached, or refuses; says what and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Grafana's answer to one call."""

    status: int
    """200 for every success: grafana-api does not tell them apart."""
    body: Any
    """Decoded JSON, or None if there was none; what a refusal says is under "message"."""

    @property
    def is_success(self) -> bool:
        """Whether Grafana did what was asked."""
        return self.status < 400

    @property
    def message(self) -> str:
        """Why Grafana refused."""
        return str(self.body.get("message", self.body)) if isinstance(self.body, Mapping) else str(self.body)


class GrafanaPort(Protocol):
    """One call to the API."""

    def call(self, method: str, path: str, body: object = None) -> Answer:
        """The answer to METHOD /api/`path`; raises GrafanaError if there is none."""
        ...


class HttpGrafana:
    """The API of a server."""

    def __init__(self, url: str, token: str, *, verify: bool = True) -> None:
        from grafana_api.grafana_face import GrafanaFace  # noqa: PLC0415  # of the extra `grafana`

        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise GrafanaError(f"{url}: not an address of Grafana: it looks like https://grafana.example:3000")
        self.url = url
        prefix = parts.path.strip("/")
        face: Any = GrafanaFace(
            auth=token,
            host=parts.netloc,
            url_path_prefix=f"{prefix}/" if prefix else "",
            protocol=parts.scheme,
            verify=verify,
            timeout=_PATIENCE_SECONDS,
        )
        self._api: Any = face.api

    def call(self, method: str, path: str, body: object = None) -> Answer:
        """The answer to METHOD /api/`path`.

        Raises:
            GrafanaError: there is no answer, it is no JSON, the token is refused, or the server is at fault.
        """
        from grafana_api.grafana_api import GrafanaException, GrafanaServerError  # noqa: PLC0415
        from requests.exceptions import JSONDecodeError, RequestException  # noqa: PLC0415

        try:
            answered: object = getattr(self._api, method)(path, json=body, headers=_HEADERS)
        except JSONDecodeError as error:  # before RequestException, of which it is one
            return self._without_json(path, error)
        except GrafanaServerError as error:
            raise GrafanaError(f"{self.url}: {error}: see the log of Grafana") from error
        except GrafanaException as error:
            return self._refused(path, int(error.status_code), error.response)
        except RequestException as error:
            raise GrafanaError(f"no Grafana answers at {self.url}: {error}. Name it with --url") from error
        return Answer(status=200, body=answered)

    def _without_json(self, path: str, error: ValueError) -> Answer:
        document = getattr(error, "doc", "")
        if document:
            raise GrafanaError(
                f"{self.url}: the answer to {path} is no JSON: is there a login page before it?"
            ) from error
        return Answer(status=200, body=None)

    def _refused(self, path: str, status: int, body: object) -> Answer:
        answer = Answer(status=status, body=body)
        if status in (401, 403):
            raise GrafanaError(
                f"{self.url}: Grafana refuses {path}: {answer.message}. The token needs the role Admin, or the "
                "permissions that docs/grafana.md lists"
            )
        return answer
