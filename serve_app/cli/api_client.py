"""A small client of our HTTP API, whose errors are sentences for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Self

import httpx

from ..client_key import KEY_VARIABLE

_CONNECT_TIMEOUT_S = 5.0
_EXAMPLE = "http://127.0.0.1:8000"


class ApiFailure(Exception):
    """An answer that is an error, or none at all; its text says what to do."""


class ApiClient:
    """Speaks JSON with one server."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        # An answer may take as long as it takes; a connection may not.
        timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        self.base_url = base_url.rstrip("/")
        try:
            self._http = httpx.Client(base_url=self.base_url, headers=headers, timeout=timeout)
        except httpx.InvalidURL as error:
            raise ApiFailure(f"{base_url!r} is no address of a server: {error}; one looks like {_EXAMPLE}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        """The JSON of a GET. Raises ApiFailure."""
        wanted = {name: value for name, value in query.items() if value is not None}
        try:
            return read_answer(self._http.get(path, params=wanted))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON of a POST. Raises ApiFailure."""
        try:
            return read_answer(self._http.post(path, json=body))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed answer, until its `[DONE]`. Closing the iterator cancels it at the server.

        Raises ApiFailure for an error in place of the answer or within it, and for a stream that is cut.
        """
        try:
            with self._http.stream("POST", path, json={**body, "stream": True}) as answer:
                if answer.status_code != httpx.codes.OK:
                    answer.read()
                    read_answer(answer)
                for line in answer.iter_lines():
                    # Proxies add comments, which begin with a colon, to keep a quiet connection open.
                    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                    if data == "[DONE]":
                        return
                    if data:
                        yield _checked(json.loads(data))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        raise ApiFailure("the stream ended before its last event; the server's log may say why")

    def _unreachable(self, error: httpx.HTTPError) -> ApiFailure:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ApiFailure(
                f"nobody answers at {self.base_url}; start a server with `make serve`, name another with --server, "
                "or run the model in this process with --local"
            )
        return ApiFailure(f"the connection to {self.base_url} broke: {error!r}")


def read_answer(answer: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer. Raises ApiFailure for one that is an error, or no JSON."""
    try:
        content = answer.json()
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ApiFailure(f"{answer.url} answered {answer.status_code} with something that is no JSON object")
    return _checked(content, answer)


def _checked(content: dict[str, Any], answer: httpx.Response | None = None) -> dict[str, Any]:
    error = content.get("error")
    if not isinstance(error, dict):
        return content
    details = [str(error.get("code") or error.get("type"))]
    if answer is not None:
        details.insert(0, str(answer.status_code))
        details += [
            f"{name} {answer.headers[name]}" for name in ("x-request-id", "retry-after") if name in answer.headers
        ]
    wants_key = error.get("code") == "invalid_api_key"
    hint = f"; this command sends the key that {KEY_VARIABLE} holds" if wants_key else ""
    raise ApiFailure(f"{error.get('message')}{hint} ({', '.join(details)})")
