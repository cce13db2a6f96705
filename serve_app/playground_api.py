"""The playground over HTTP: a page and its files, as they lie in the package. Knows nothing of models or requests.

All files are read once and looked up by name, so no path of a request ever reaches the file system.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

FOLDER = Path(__file__).parent / "playground"
PAGE = "index.html"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".md": "text/markdown; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""What the folder may hold. Types are named here and not guessed, since machines differ in what they guess."""

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS = {
    "content-security-policy": "; ".join(f"{name} {source}" for name, source in _POLICY.items()),
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    # Files of one version belong together and carry no version in their names: ask each time, fetch what changed.
    "cache-control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as it is sent."""

    body: bytes
    media_type: str
    etag: str


def read_files(folder: Path) -> Mapping[str, PageFile]:
    """Path under `folder`, with slashes -> file; those of a type that MEDIA_TYPES does not name are left out."""
    files: dict[str, PageFile] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in MEDIA_TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
            files[path.relative_to(folder).as_posix()] = PageFile(body, MEDIA_TYPES[path.suffix], etag)
    return files


@router.api_route("/", methods=["GET", "HEAD"])
async def get_page(request: Request) -> Response:
    """The page."""
    return _answer(request, PAGE)


@router.api_route("/playground/{path:path}", methods=["GET", "HEAD"])
async def get_file(request: Request, path: str) -> Response:
    """A file of the page; 404 for every other path."""
    return _answer(request, path)


_files = cache(read_files)


def _answer(request: Request, path: str) -> Response:
    file = _files(FOLDER).get(path)
    if file is None:
        raise HTTPException(404, f"the playground has no file {path!r}")
    headers = {**HEADERS, "etag": file.etag}
    if _has(request.headers.get("if-none-match", ""), file.etag):
        return Response(status_code=304, headers=headers)
    # For HEAD the server leaves the body out and keeps its length.
    return Response(file.body, media_type=file.media_type, headers=headers)


def _has(if_none_match: str, etag: str) -> bool:
    """Whether a client's list of tags holds this one, compared weakly as the header asks."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return etag in tags or "*" in tags
