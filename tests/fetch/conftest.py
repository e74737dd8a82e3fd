"""A web server on this machine that drops connections, redirects and lies, one scripted answer after the other."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Answer = Callable[[Any, bytes], None]
"""Answers a request, given its handler and the content that is at its path."""


@dataclass
class Site:
    """What the server has, what it does, and what it was asked."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    """ETags; a path without one has none."""
    script: dict[str, list[Answer]] = field(default_factory=dict)
    """Answers that come first, each once; then the server is honest."""
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def ranges(self) -> list[str | None]:
        """The Range header of every request so far."""
        return [headers.get("Range") for _, headers in self.asked]


def honest(handler: Any, content: bytes) -> None:
    """The whole file, or the rest that was asked for."""
    tag = handler.site.tags.get(handler.path)
    wanted = handler.headers.get("Range")
    condition = handler.headers.get("If-Range")
    if wanted and condition in (None, tag):
        first = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])  # type: ignore[index]
        if first >= len(content):
            handler.begin(416, {"Content-Range": f"bytes */{len(content)}", "Content-Length": "0"})
            return
        rest = content[first:]
        part = f"bytes {first}-{len(content) - 1}/{len(content)}"
        handler.begin(206, {"Content-Range": part, "Content-Length": str(len(rest))})
        handler.wfile.write(rest)
        return
    handler.begin(200, {"Content-Length": str(len(content))})
    handler.wfile.write(content)


class Handler(BaseHTTPRequestHandler):
    """One request: the next answer of the script, or the honest one."""

    site: Site

    def do_GET(self) -> None:
        self.site.asked.append((self.path, dict(self.headers)))
        script = self.site.script.get(self.path, [])
        if script:
            script.pop(0)(self, self.site.files.get(self.path, b""))
        elif self.path in self.site.files:
            honest(self, self.site.files[self.path])
        else:
            self.begin(404, {"Content-Length": "0"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.do_GET()

    def begin(self, status: int, headers: dict[str, str]) -> None:
        """Status line and headers; text/plain and the path's ETag unless said otherwise."""
        tag = self.site.tags.get(self.path)
        self.send_response(status)
        for name, value in {"Content-Type": "text/plain", **({"ETag": tag} if tag else {}), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A running server; the proxies of whoever tests are left out."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with serving() as site:
        yield site


@pytest.fixture
def other_site() -> Iterator[Site]:
    """A second server: another host, as far as ports tell."""
    with serving() as site:
        yield site


class serving:
    """A server for the time of a `with` block."""

    def __enter__(self) -> Site:
        site = Site()
        handler = type("Scripted", (Handler,), {"site": site})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that hang up are no news
        site.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return site

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
