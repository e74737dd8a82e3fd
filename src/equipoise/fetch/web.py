"""One answer of a web server, as it is: no status is an error here, and redirects are followed by rules of our own.

Python's own client under it, so proxies and certificates are those of the system. Not for: what an answer means
(`download`), or what is asked for (`stories`, `books`).
"""

from __future__ import annotations

import ssl
import string
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPResponse
from typing import Final
from urllib.error import URLError
from urllib.parse import quote, urljoin, urlsplit

from equipoise import __version__
from equipoise.errors import DataError
from equipoise.faults import cut, not_accepted, printable, reason

REDIRECTS: Final = (301, 302, 303, 307, 308)
MAX_REDIRECTS: Final = 5
"""A hub's file takes one or two; browsers stop at 20."""
SECRETS: Final = ("authorization", "cookie")
"""Headers that stay with the server they are meant for."""
AGENT: Final = f"equipoise/{__version__}"


class Passing(Exception):
    """What may be otherwise a moment later: a connection that was lost, a server that is busy.

    `wait_s` is how long the server asks to wait; 0 when it does not say.
    """

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


def shown(url: str) -> str:
    """An address for a message: without its query, which may hold a signature, and without a password.

    >>> shown("https://me:secret@example.org/a/b.txt?Signature=x")
    'https://example.org/a/b.txt'
    """
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
    except ValueError:
        return cut(printable(url))
    return printable(f"{parts.scheme}://{host}{parts.path}")


def check_url(url: str, where: str) -> None:
    """DataError, beginning with `where`, unless `url` is an address of a web server."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable or not url.isprintable() or " " in url:
        raise DataError(not_accepted(where, url, "the address of a web server, https://HOST/…"))


def ask(url: str, headers: Mapping[str, str], timeout_s: float) -> HTTPResponse:
    """The answer to a GET of `url`, wherever redirects lead, its body not yet read; close it.

    At most 5 redirects are followed, never from https to http nor to anything but a web server, and secrets in
    `headers` are not sent to another host. Nothing compressed is asked for. Raises Passing when the server cannot be
    reached, DataError for what will not change: a certificate that is not trusted, redirects beyond the rules.
    """
    sent = {"User-Agent": AGENT, "Accept-Encoding": "identity", **headers}
    opener = urllib.request.OpenerDirector()  # bare: without handlers of redirects, errors, files and FTP
    for handler in (urllib.request.ProxyHandler(), urllib.request.HTTPHandler(), urllib.request.HTTPSHandler()):
        opener.add_handler(handler)
    first = url
    for _ in range(MAX_REDIRECTS + 1):
        try:
            response = opener.open(urllib.request.Request(url, headers=sent), timeout=timeout_s)
        except (OSError, HTTPException) as error:
            raise _unreached(url, error) from None
        except ValueError as error:  # an address that cannot be put into a request
            raise DataError(f"{shown(url)}: cannot be asked for ({reason(error)})") from None
        if response is None:  # no handler: another scheme
            raise DataError(f"{shown(url)}: expected https://HOST/…")
        if response.status not in REDIRECTS:
            assert isinstance(response, HTTPResponse)
            return response
        response.close()
        target = _target(url, response.headers.get("Location"), first)
        if urlsplit(target).netloc != urlsplit(url).netloc:
            sent = {name: value for name, value in sent.items() if name.lower() not in SECRETS}
        url = target
    raise DataError(f"{shown(first)}: more than {MAX_REDIRECTS} redirects, the last to {shown(url)}")


def _target(url: str, location: str | None, first: str) -> str:
    """Where a redirect leads; DataError where nobody should follow."""
    if not location:
        raise DataError(f"{shown(url)}: a redirect that does not say where to")
    target = location
    with suppress(ValueError):  # what cannot be joined is no address, and refused as such
        target = urljoin(url, quote(location, safe=string.punctuation, encoding="iso-8859-1"))
    check_url(target, f"{shown(first)}: redirected")
    if urlsplit(url).scheme == "https" and urlsplit(target).scheme == "http":
        raise DataError(f"{shown(first)}: redirected to {shown(target)}, from https to http; not followed")
    return target


def _unreached(url: str, error: Exception) -> Exception:
    """A failure to get an answer: one that may pass, or one that will not."""
    cause = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return DataError(f"{shown(url)}: its certificate is not trusted ({cause.verify_message})")
    if isinstance(cause, TimeoutError):
        return Passing(f"no answer from {urlsplit(url).hostname}")
    text = getattr(cause, "strerror", None) or (reason(cause) if isinstance(cause, Exception) else str(cause))
    return Passing(f"{urlsplit(url).hostname} cannot be reached ({printable(text)})")


def retry_after(value: str | None, now_s: float) -> float:
    """Seconds that a Retry-After header asks to wait from `now_s` (Unix time) on; 0 without one that can be read.

    >>> retry_after("7", 0.0), retry_after("Thu, 01 Jan 1970 00:01:00 GMT", 20.0), retry_after("soon", 0.0)
    (7.0, 40.0, 0.0)
    """
    if value is None:
        return 0.0
    if value.isascii() and value.isdecimal():
        return float(value[:12])
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now_s)
    except (ValueError, OverflowError):
        return 0.0
