"""A download ends with the very bytes of the file or with one line that says why, whatever the server does."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from equipoise.errors import DataError, EquipoiseError, ResourceError
from equipoise.fetch import download as module
from equipoise.fetch.download import NotThere, Progress, Remote, Unusable, discard, download, part_of
from equipoise.fetch.web import ask, check_url

CONTENT = bytes(np.random.Generator(np.random.Philox(key=7)).integers(0, 256, 300_007, dtype=np.uint8))
SHA = hashlib.sha256(CONTENT).hexdigest()
TAG = '"first"'


class Watched:
    """Takes what a download says and how long it would wait."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.slept: list[float] = []
        self.reports: list[tuple[str, int, int | None]] = []
        self.progress = Progress(
            report=lambda *facts: self.reports.append(facts), say=self.said.append, sleep=self.slept.append
        )


@pytest.fixture
def watched() -> Watched:
    return Watched()


def remote(site: Any, path: str = "/f.txt", **known: Any) -> Remote:
    return Remote(**{"url": site.url + path, "name": "f.txt", "max_bytes": 1 << 20, **known})


def put(site: Any, content: bytes = CONTENT, *answers: Callable[[Any, bytes], None], tag: str | None = TAG) -> None:
    site.files["/f.txt"] = content
    site.script["/f.txt"] = list(answers)
    site.tags = {"/f.txt": tag} if tag else {}


def fetched(folder: Path) -> bytes:
    return part_of(folder, "f.txt").read_bytes()


def fault(error: type[EquipoiseError], what: Remote, folder: Path, watched: Watched, **options: Any) -> str:
    """The message of a download that fails, one line that can be printed, without the address of the test."""
    with pytest.raises(error) as caught:
        download(what, folder, watched.progress, **options)
    assert type(caught.value) is error
    text = str(caught.value)
    assert text.isprintable()
    return text.replace(what.url, "URL")


# ------------------------------------------------------------------------------------------------ answers


def drop(after: int, stated: int | None = None) -> Callable[[Any, bytes], None]:
    """Honest about what was asked for, but the connection ends after so many bytes."""

    def answer(handler: Any, content: bytes) -> None:
        wanted = handler.headers.get("Range")
        first = int(wanted[6:-1]) if wanted else 0
        rest, length = content[first:], stated if stated is not None else len(content) - first
        facts = {"Content-Range": f"bytes {first}-{len(content) - 1}/{len(content)}"} if wanted else {}
        handler.begin(206 if wanted else 200, {"Content-Length": str(length), **facts})
        handler.wfile.write(rest[:after])
        handler.wfile.flush()
        handler.connection.shutdown(socket.SHUT_RDWR)

    return answer


def say(status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> Callable[[Any, bytes], None]:
    def answer(handler: Any, _: bytes) -> None:
        handler.begin(status, {"Content-Length": str(len(body)), **(headers or {})})
        handler.wfile.write(body)

    return answer


def whole(handler: Any, content: bytes) -> None:
    """The whole file, whatever was asked for."""
    handler.begin(200, {"Content-Length": str(len(content))})
    handler.wfile.write(content)


def pieces(*sizes: int, end: bytes = b"0\r\n\r\n", stated: str = "") -> Callable[[Any, bytes], None]:
    """In chunks of these sizes, with a length only if `stated`; `end` comes after them."""

    def answer(handler: Any, content: bytes) -> None:
        handler.protocol_version = "HTTP/1.1"
        length = {"Content-Length": stated} if stated else {}
        handler.begin(200, {"Transfer-Encoding": "chunked", "Connection": "close", **length})
        at = 0
        for one in sizes:
            handler.wfile.write(f"{one:x}\r\n".encode() + content[at : at + one] + b"\r\n")
            at += one
        handler.wfile.write(end)
        handler.close_connection = True

    return answer


def raw(sent: bytes) -> Callable[[Any, bytes], None]:
    """These bytes instead of an answer."""

    def answer(handler: Any, _: bytes) -> None:
        handler.wfile.write(sent)
        handler.close_connection = True

    return answer


# ------------------------------------------------------------------------------------------------ whole files


@pytest.mark.parametrize("known", [{}, {"sha256": SHA}, {"num_bytes": len(CONTENT), "sha256": SHA}])
def test_a_file_arrives(site: Any, tmp_path: Path, watched: Watched, known: dict[str, Any]) -> None:
    put(site)
    assert download(remote(site, **known), tmp_path, watched.progress) == SHA
    assert fetched(tmp_path) == CONTENT
    assert not watched.said and not watched.slept
    assert watched.reports[-1] == ("f.txt", len(CONTENT), len(CONTENT))
    ((path, headers),) = site.asked
    assert path == "/f.txt" and headers["User-Agent"].startswith("equipoise/")
    assert headers["Accept-Encoding"] == "identity" and "Range" not in headers


def test_a_dropped_connection_goes_on_at_the_very_byte(site: Any, tmp_path: Path, watched: Watched) -> None:
    put(site, CONTENT, drop(1), drop(99_999), drop(70_000))
    assert download(remote(site), tmp_path, watched.progress) == SHA
    assert site.ranges() == [None, "bytes=1-", "bytes=100000-", "bytes=170000-"]
    assert [headers.get("If-Range") for _, headers in site.asked] == [None, TAG, TAG, TAG]
    assert watched.slept == [1.0, 2.0, 4.0]
    address = f"{site.url}/f.txt: "
    assert watched.said[1] == f"{address}the connection ended after 100,000 of 300,007 bytes; trying again in 2.0 s"


def test_any_sequence_of_drops_gives_the_same_bytes(site: Any, tmp_path: Path, watched: Watched) -> None:
    chance = np.random.Generator(np.random.Philox(key=11))
    for round_ in range(25):
        folder = tmp_path / str(round_)
        folder.mkdir()
        cuts = chance.integers(0, 120_000, chance.integers(0, 5)).tolist()
        known = {"sha256": SHA} if round_ % 2 else {}
        put(site, CONTENT, *(drop(cut) for cut in cuts))
        assert download(remote(site, **known), folder, watched.progress) == SHA
        assert fetched(folder) == CONTENT


def test_progress_is_patient_and_no_progress_is_not(
    site: Any, tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROGRESS", 20_000)
    put(site, CONTENT, *(drop(20_000) for _ in range(14)))  # more drops than attempts, each after some progress
    assert download(remote(site), tmp_path, watched.progress) == SHA
    assert watched.slept == [1.0] * 14
    discard(part_of(tmp_path, "f.txt"))
    put(site, CONTENT, *(drop(19_999) for _ in range(14)))
    assert fault(DataError, remote(site), tmp_path, Watched()) == (
        "URL: the connection ended after 99,995 of 300,007 bytes; given up after 5 attempts; 97.7 KiB are kept and "
        "gone on with next time"
    )
    site.script.clear()
    assert download(remote(site), tmp_path, watched.progress) == SHA
    assert site.ranges()[-1] == "bytes=99995-"


def test_a_later_call_goes_on(site: Any, tmp_path: Path, watched: Watched) -> None:
    put(site, CONTENT, drop(123_456))

    def hang_up(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(remote(site), tmp_path, Progress(report=lambda *_: None, say=print, sleep=hang_up))
    assert fetched(tmp_path) == CONTENT[:123_456]
    assert download(remote(site), tmp_path, watched.progress) == SHA
    assert site.ranges() == [None, "bytes=123456-"]
    assert download(remote(site), tmp_path, watched.progress) == SHA  # whole, but not yet named: nothing is asked
    assert len(site.asked) == 2


def leave_part(folder: Path, content: bytes, **note: Any) -> None:
    """A part as an earlier call left it."""
    part_of(folder, "f.txt").write_bytes(content)
    (folder / "f.txt.part.json").write_text(json.dumps(note), encoding="utf-8")


def test_a_file_that_changed_meanwhile_is_fetched_anew(site: Any, tmp_path: Path, watched: Watched) -> None:
    put(site, CONTENT[::-1], tag='"second"')
    leave_part(tmp_path, CONTENT[:5000], url=f"{site.url}/f.txt", sha256=None, validator=TAG, bytes=len(CONTENT))
    download(remote(site), tmp_path, watched.progress)
    assert fetched(tmp_path) == CONTENT[::-1]
    assert watched.said == ["f.txt: the server does not go on with a file, or has another; beginning again"]


@pytest.mark.parametrize(
    "note",
    [
        {"url": "http://elsewhere/f.txt", "sha256": None, "validator": TAG, "bytes": None},
        {"url": "", "sha256": SHA, "validator": TAG, "bytes": None},
        {"url": "", "sha256": None, "validator": "", "bytes": None},
        {"url": "", "sha256": None, "validator": TAG, "bytes": "many"},
        {"url": "", "sha256": None, "validator": 5, "bytes": 7},
        {},
    ],
)
def test_a_part_of_something_else_is_not_gone_on_with(
    site: Any, tmp_path: Path, watched: Watched, note: dict[str, Any]
) -> None:
    put(site)
    leave_part(tmp_path, b"other bytes", **{**note, **({"url": f"{site.url}/f.txt"} if note.get("url") == "" else {})})
    assert download(remote(site), tmp_path, watched.progress) == SHA
    assert site.ranges() == [None]


def test_without_a_validator_a_part_is_kept_only_under_a_known_hash(
    site: Any, tmp_path: Path, watched: Watched
) -> None:
    put(site, CONTENT, drop(1000), tag='W/"weak"')
    assert download(remote(site), tmp_path, watched.progress) == SHA
    assert site.ranges() == [None, None]
    discard(part_of(tmp_path, "f.txt"))
    put(site, CONTENT, drop(1000), tag=None)
    assert download(remote(site, sha256=SHA), tmp_path, watched.progress) == SHA
    assert site.ranges()[2:] == [None, "bytes=1000-"]
    assert "If-Range" not in site.asked[-1][1]


def test_a_server_that_ignores_ranges(site: Any, tmp_path: Path, watched: Watched) -> None:
    put(site, CONTENT, drop(1000), whole)
    assert download(remote(site, sha256=SHA), tmp_path, watched.progress) == SHA
    assert fetched(tmp_path) == CONTENT


@pytest.mark.parametrize(
    "stated",
    ["bytes 999-300006/300007", "bytes 1000-300006/300008", "bytes 1000-300006/*", "nonsense", "", "bytes */300007"],
)
def test_a_wrong_piece_is_never_appended(site: Any, tmp_path: Path, watched: Watched, stated: str) -> None:
    put(site, CONTENT, drop(1000), say(206, {"Content-Range": stated}, CONTENT[999:]))
    assert download(remote(site), tmp_path, watched.progress) == SHA
    assert site.ranges() == [None, "bytes=1000-", None]
    assert "another piece than was asked for" in watched.said[1]


def test_a_server_that_goes_on_with_another_file(site: Any, tmp_path: Path, watched: Watched) -> None:
    """It takes the range and passes over If-Range: only its own ETag tells."""
    piece = {"Content-Range": f"bytes 1000-{len(CONTENT) - 1}/{len(CONTENT)}"}

    def changed(handler: Any, _: bytes) -> None:
        site.tags["/f.txt"] = '"second"'
        say(206, piece, CONTENT[::-1][1000:])(handler, b"")

    put(site, CONTENT[::-1], lambda handler, _: drop(1000)(handler, CONTENT), changed)
    assert download(remote(site), tmp_path, watched.progress) == hashlib.sha256(CONTENT[::-1]).hexdigest()
    assert site.ranges() == [None, "bytes=1000-", None]
    assert "the server went on with another file than was begun; beginning again" in watched.said[1]


def test_a_piece_that_nobody_asked_for(site: Any, tmp_path: Path, watched: Watched) -> None:
    put(site, CONTENT, say(206, {"Content-Range": "bytes 5-9/10"}, b"56789"))
    assert download(remote(site), tmp_path, watched.progress) == SHA


def test_a_range_that_cannot_be_satisfied(site: Any, tmp_path: Path, watched: Watched) -> None:
    put(site)
    note = {"url": f"{site.url}/f.txt", "sha256": None, "validator": TAG, "bytes": None}
    leave_part(tmp_path, CONTENT, **note)  # whole, of a length that was not known: the server says so
    assert download(remote(site), tmp_path, watched.progress) == SHA
    assert not watched.said
    leave_part(tmp_path, CONTENT + b"more", **note)
    assert download(remote(site), tmp_path, watched.progress) == SHA
    assert "the server cannot go on at byte 300,011; beginning again" in watched.said[0]


# ------------------------------------------------------------------------------------------------ lengths


def test_a_length_that_is_too_large(site: Any, tmp_path: Path, watched: Watched) -> None:
    put(site, CONTENT, *(drop(len(CONTENT), stated=len(CONTENT) + 1) for _ in range(5)), tag=None)
    assert fault(DataError, remote(site), tmp_path, watched).startswith(
        "URL: the connection ended after 300,007 of 300,008 bytes; given up after 5 attempts"
    )
    assert watched.slept == [1.0, 2.0, 4.0, 8.0]


def test_a_length_that_is_too_small(site: Any, tmp_path: Path, watched: Watched) -> None:
    put(site, CONTENT, *(drop(len(CONTENT), stated=1000) for _ in range(2)))
    known = remote(site, num_bytes=len(CONTENT))
    assert fault(Unusable, known, tmp_path, watched) == "URL: 1,000 bytes; expected 300,007"
    text = fault(Unusable, remote(site, sha256=SHA), tmp_path, watched)
    assert text.endswith(f"; expected {SHA}; what came is thrown away")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stated", ["-5", "many", "1e3", "", "9" * 30])
def test_a_length_that_is_none(site: Any, tmp_path: Path, watched: Watched, stated: str) -> None:
    put(site, CONTENT, say(200, {"Content-Length": stated}, CONTENT))
    assert fault(Unusable, remote(site), tmp_path, watched) == "URL: the server does not say how long the file is"


@pytest.mark.parametrize("stated", ["", "1000", "999999"])
def test_pieces_are_as_long_as_they_are(site: Any, tmp_path: Path, watched: Watched, stated: str) -> None:
    """A length beside them does not count: where they end is known without."""
    put(site, CONTENT, pieces(1, 65_537, 100_003, 134_466, stated=stated))
    assert download(remote(site), tmp_path, watched.progress) == SHA
    assert not watched.said


@pytest.mark.parametrize("end", [b"", b"ffff\r\n", b"ffff\r\n" + CONTENT[1500:1501], b"zz\r\n"])
def test_pieces_that_break_off(site: Any, tmp_path: Path, watched: Watched, end: bytes) -> None:
    put(site, CONTENT, pieces(1000, 500, end=end))
    assert download(remote(site), tmp_path, watched.progress) == SHA
    assert site.ranges() == [None, "bytes=1501-" if len(end) == 7 else "bytes=1500-"]
    assert fetched(tmp_path) == CONTENT


def test_no_more_than_the_limit_is_fetched(site: Any, tmp_path: Path, watched: Watched) -> None:
    put(site)
    small = remote(site, max_bytes=300_006)
    assert fault(Unusable, small, tmp_path, watched) == "URL: 300,007 bytes; expected at most 300,006"
    put(site, CONTENT, pieces(100_000, 100_000, 100_007))
    text = fault(Unusable, remote(site, max_bytes=150_000), tmp_path, watched)
    assert text == "URL: over 150,000 bytes came; expected at most that"
    assert fetched(tmp_path) == b""


# ------------------------------------------------------------------------------------------------ statuses


def test_a_busy_server_says_how_long_to_wait(site: Any, tmp_path: Path, watched: Watched) -> None:
    later = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 200))
    put(site, CONTENT, say(429, {"Retry-After": "7"}), say(503, {"Retry-After": later}), say(500), say(502))
    assert download(remote(site), tmp_path, watched.progress) == SHA
    assert watched.slept[0] == 7.0 and 100 < watched.slept[1] <= 200 and watched.slept[2:] == [4.0, 8.0]
    assert watched.said[0].endswith("/f.txt: HTTP 429 Too Many Requests; trying again in 7.0 s")


def test_a_wait_of_hours_is_left_to_people(site: Any, tmp_path: Path, watched: Watched) -> None:
    put(site, CONTENT, say(429, {"Retry-After": "7200"}))
    assert fault(DataError, remote(site), tmp_path, watched) == (
        "URL: HTTP 429 Too Many Requests; it asks to wait 2 h 0 min: try again then"
    )
    assert not watched.slept


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        (404, NotThere, "URL: not there (HTTP 404 Not Found)"),
        (410, NotThere, "URL: not there (HTTP 410 Gone)"),
        (401, DataError, "URL: HTTP 401 Unauthorized"),
        (403, DataError, "URL: HTTP 403 Forbidden"),
        (204, DataError, "URL: HTTP 204 No Content"),
        (400, DataError, "URL: HTTP 400 Bad Request"),
    ],
)
def test_statuses_that_do_not_pass(
    site: Any, tmp_path: Path, watched: Watched, status: int, error: type[DataError], text: str
) -> None:
    put(site, CONTENT, say(status))
    assert fault(error, remote(site), tmp_path, watched) == text
    assert len(site.asked) == 1 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ({"Content-Type": "text/html; charset=utf-8"}, "URL: a web page came instead of the file"),
        ({"Content-Encoding": "gzip"}, "URL: sent as gzip; expected the file itself, uncompressed"),
    ],
)
def test_something_else_than_the_file(
    site: Any, tmp_path: Path, watched: Watched, headers: dict[str, str], text: str
) -> None:
    put(site, CONTENT, say(200, headers, b"<html>sign in</html>"))
    assert fault(Unusable, remote(site), tmp_path, watched) == text


@pytest.mark.parametrize(
    "sent", [b"", b"no such protocol\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200]
)
def test_what_is_no_answer(site: Any, tmp_path: Path, watched: Watched, sent: bytes) -> None:
    put(site, CONTENT, raw(sent), raw(sent))
    assert download(remote(site), tmp_path, watched.progress) == SHA
    assert all(line.isprintable() and "127.0.0.1 cannot be reached" in line for line in watched.said)


def test_a_server_that_falls_silent(site: Any, tmp_path: Path, watched: Watched) -> None:
    def stall(handler: Any, content: bytes) -> None:
        handler.begin(200, {"Content-Length": str(len(content))})
        handler.wfile.write(content[:1000])
        handler.wfile.flush()
        time.sleep(1.0)

    put(site, CONTENT, stall, lambda *_: time.sleep(1.0))
    assert download(remote(site), tmp_path, watched.progress, timeout_s=0.2) == SHA
    assert "nothing more came after 1,000 of 300,007 bytes" in watched.said[0]
    assert "no answer from 127.0.0.1" in watched.said[1]


def test_nobody_listens(tmp_path: Path, watched: Watched, site: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        gone = SimpleNamespace(url=f"http://127.0.0.1:{taken.getsockname()[1]}")
        text = fault(DataError, remote(gone), tmp_path, watched)
    assert text == "URL: 127.0.0.1 cannot be reached (Connection refused); given up after 5 attempts"


# ------------------------------------------------------------------------------------------------ redirects


def test_redirects_are_followed(site: Any, other_site: Any, tmp_path: Path, watched: Watched) -> None:
    put(other_site)
    site.script = {
        "/f.txt": [say(302, {"Location": "/a b/é"})],
        "/a%20b/%C3%A9": [say(307, {"Location": f"{other_site.url}/f.txt"})],
    }
    site.script["/a%20b/%E9"] = site.script["/a%20b/%C3%A9"]
    secret = {"Authorization": "Bearer secret", "X-Plain": "kept"}
    assert download(remote(site, headers=secret), tmp_path, watched.progress) == SHA
    assert [headers.get("Authorization") for _, headers in site.asked] == ["Bearer secret"] * 2
    ((_, headers),) = other_site.asked
    assert "Authorization" not in headers and headers["X-Plain"] == "kept"


def test_after_a_drop_the_redirect_is_asked_anew(site: Any, other_site: Any, tmp_path: Path, watched: Watched) -> None:
    """The address that a hub redirects to is signed and soon no longer valid."""
    put(other_site, CONTENT, drop(5000))
    site.script["/f.txt"] = [say(302, {"Location": f"{other_site.url}/f.txt"})] * 2
    assert download(remote(site), tmp_path, watched.progress) == SHA
    assert len(site.asked) == 2 and other_site.ranges() == [None, "bytes=5000-"]


@pytest.mark.parametrize(
    ("location", "text"),
    [
        ("/f.txt", "URL: more than 5 redirects, the last to URL"),
        (
            "file:///etc/passwd",
            'URL: redirected: "file:///etc/passwd" is not accepted; expected the address of a web server, https://HOST/…',
        ),
        (
            "ftp://x/y",
            'URL: redirected: "ftp://x/y" is not accepted; expected the address of a web server, https://HOST/…',
        ),
        ("http://[bad/", "URL: redirected"),
        ("", "URL: a redirect that does not say where to"),
    ],
)
def test_redirects_that_are_not(site: Any, tmp_path: Path, watched: Watched, location: str, text: str) -> None:
    put(site, CONTENT, *[say(301, {"Location": location})] * 9)
    assert fault(DataError, remote(site), tmp_path, watched).startswith(text)
    assert not watched.slept


def test_no_redirect_from_https_to_http(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimpleNamespace(status=302, headers={"Location": "http://example.org/f"}, close=lambda: None)
    monkeypatch.setattr("urllib.request.OpenerDirector.open", lambda *_, **__: answer)
    with pytest.raises(DataError) as caught:
        ask("https://example.org/f?signature=1", {}, 1.0)
    assert str(caught.value) == (
        "https://example.org/f: redirected to http://example.org/f, from https to http; not followed"
    )


@pytest.mark.parametrize(
    "url", ["", "example.org", "file:///f", "https://", "http://a b/", "http://x:99999999/", "x:\n"]
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(
        DataError, match=r"^here: .* is not accepted; expected the address of a web server, https://HOST/…$"
    ):
        check_url(url, "here")


# ------------------------------------------------------------------------------------------------ content and disk


def test_another_file_than_expected_is_thrown_away(site: Any, tmp_path: Path, watched: Watched) -> None:
    put(site, b"x" * len(CONTENT))
    known = remote(site, sha256=SHA, num_bytes=len(CONTENT))
    found = hashlib.sha256(b"x" * len(CONTENT)).hexdigest()
    text = f"URL: SHA-256 {found}; expected {SHA}; what came is thrown away"
    assert fault(Unusable, known, tmp_path, watched) == text
    assert list(tmp_path.iterdir()) == []
    refused = remote(site, fault=lambda path: f"{path.stat().st_size} crosses")
    assert fault(Unusable, refused, tmp_path, watched) == "URL: 300007 crosses"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are not known to this system")
def test_a_full_disk_keeps_what_is_there(site: Any, tmp_path: Path, watched: Watched) -> None:
    import resource

    put(site)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_001, before[1]))
    try:
        text = fault(ResourceError, remote(site), tmp_path, watched)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert text == (
        f"{tmp_path / 'f.txt.part'}: cannot be written (File too large); 100,001 bytes are kept; make room, then the "
        "same command goes on"
    )
    assert download(remote(site), tmp_path, watched.progress) == SHA
    assert site.ranges() == [None, "bytes=100001-"]


def test_too_little_room_is_said_before(
    site: Any, tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(site)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    text = fault(ResourceError, remote(site), tmp_path, watched)
    assert text == f"{tmp_path}: 1,000 bytes free; expected at least 300,007 for f.txt.part"
