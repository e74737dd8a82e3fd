"""`equipoise data fetch` as people call it: what it prints, its exit codes, Ctrl-C, and who names the command."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from equipoise.cli.console import read_study
from equipoise.cli.live import Sparse
from equipoise.cli.main import call
from equipoise.fetch import books
from equipoise.files import held
from equipoise.spec.data import STARTING_BOOKS

BOOK = "Project Gutenberg's book of nothing.\n" * 10_000
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def mirror(site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A mirror with books 7 and 84; the current folder is the test's."""
    monkeypatch.chdir(tmp_path)
    for number in (7, 84):
        site.files[f"/cache/epub/{number}/pg{number}.txt"] = BOOK.encode()
        site.tags[f"/cache/epub/{number}/pg{number}.txt"] = '"tag"'
    return site


def gutenberg(site: Any, *words: str) -> int:
    return call(["data", "fetch", "gutenberg", *words, "--mirror", site.url, "--pause", "0"])


def start(*words: str, cwd: Path, stderr: int = subprocess.PIPE, **environment: str) -> subprocess.Popen[str]:
    """The command as a process of its own."""
    kept = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-m", "equipoise", "data", "fetch", *words],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "HOME": str(cwd), "LC_ALL": "C.UTF-8", **kept, **environment},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        encoding="utf-8",
    )


def test_books(mirror: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert gutenberg(mirror, "7,84") == 0
    printed, said = capsys.readouterr()
    sha256 = hashlib.sha256(BOOK.encode()).hexdigest()
    assert printed.startswith("data/gutenberg: Project Gutenberg\n")
    assert printed.count(sha256) == 2 and printed.count("fetched") == 2 and f"{len(BOOK):,}" in printed
    assert printed.splitlines()[-1] == "use it with: equipoise run gutenberg --set 'corpus.path=\"data/gutenberg\"'"
    assert "pg7.txt: 361.3 KiB" in said
    assert gutenberg(mirror, "7", "84", "--quiet") == 0
    printed, said = capsys.readouterr()
    assert printed.count("was here") == 2 and not said


def test_what_is_missing_is_one_line_and_an_exit_code(mirror: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert gutenberg(mirror, "5-7", "84", "9", "--quiet") == 3
    printed, said = capsys.readouterr()
    assert said == "3 of 5 books are not there: 5, 6, 9 (not on this mirror as plain text)\n"
    assert "pg7.txt" in printed and "pg84.txt" in printed and "use it with" in printed
    assert gutenberg(mirror, "5-60", "--json", "--quiet") == 3
    printed, said = capsys.readouterr()
    found = json.loads(printed)
    assert [file["name"] for file in found["files"]] == ["pg7.txt"] and not found["files"][0]["fetched_now"]
    assert len(found["missing"]) == 55 and found["missing"]["5"] == "not on this mirror as plain text"
    assert "55 of 56 books are not there: 5, 6, 8, 9," in said and " and 35 more (not on" in said
    assert found["directory"] == "data/gutenberg" and found["corpus"] == "gutenberg" and found["revision"] is None


@pytest.mark.parametrize("folder", ["books", "a b", "it's", 'a"b', "ä\\b"])
def test_the_printed_command_means_the_folder(mirror: Any, capsys: pytest.CaptureFixture[str], folder: str) -> None:
    assert gutenberg(mirror, "7", "--out", folder, "--json", "--quiet") == 0
    words = shlex.split(json.loads(capsys.readouterr().out)["command"])
    assert words[:4] == ["equipoise", "run", "gutenberg", "--set"]
    corpus = read_study(words[2], words[4:]).corpus
    assert corpus.path == folder and (Path(folder) / "pg7.txt").exists()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["gutenberg"], 2, "Missing argument 'IDS...'"),
        (["gutenberg", "x"], 2, 'IDS: "x" is not accepted; expected numbers of books'),
        (["gutenberg", "7", "--pause", "nan"], 2, "--pause: NaN is not accepted; expected seconds from 0 to 3600"),
        (["gutenberg", "7", "--pause", "-1"], 2, "--pause: -1.0 is not accepted; expected seconds from 0 to 3600"),
        (["gutenberg", "7", "--mirror", "x"], 2, '--mirror: "x" is not accepted; expected the address of a web server'),
        (["gutenberg", "7", "--out", ""], 2, '--out "": expected a path'),
        (["tinystories", "--revision", ""], 2, '--revision: "" is not accepted; expected a commit, branch or tag'),
        (
            ["tinystories", "--revision", "a\nb"],
            2,
            '--revision: "a\\nb" is not accepted; expected a commit, branch or tag',
        ),
        (["wikipedia"], 2, "No such command 'wikipedia'"),
    ],
)
def test_usage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(["data", "fetch", *words]) == code
    said = capsys.readouterr().err
    assert said.startswith("error: ") and text in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["gutenberg", "x"], ["tinystories", "--revision", ""], ["gutenberg"]])
def test_errors_as_json(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["data", "fetch", *words, "--json"]) == 2
    printed, said = capsys.readouterr()
    error = json.loads(printed)["error"]
    assert error["exit_code"] == 2 and said == f"error: {error['message']}\n"


def test_a_folder_that_cannot_be_used(mirror: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert gutenberg(mirror, "7", "--out", "file/x", "--quiet") == 1
    assert capsys.readouterr().err == "error: file/x: Not a directory\n"
    with held(tmp_path / "busy" / ".fetch.lock", "the test"):
        assert gutenberg(mirror, "7", "--out", "busy", "--quiet") == 6
    assert "error: folder busy: held by process" in capsys.readouterr().err
    assert not mirror.asked


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="nothing is forbidden here")
def test_a_folder_that_cannot_be_written(mirror: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    try:
        assert gutenberg(mirror, "7", "--quiet") == 1
    finally:
        tmp_path.chmod(0o700)
    assert capsys.readouterr().err == "error: data: Permission denied\n"


@pytest.mark.skipif(sys.platform == "win32", reason="signals are others there")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_a_part_to_go_on_with(mirror: Any, tmp_path: Path, number: signal.Signals, code: int) -> None:
    path = "/cache/epub/7/pg7.txt"

    def stall(handler: Any, content: bytes) -> None:
        handler.begin(200, {"Content-Length": str(len(content))})
        handler.wfile.write(content[:100_000])
        handler.wfile.flush()
        time.sleep(20)

    mirror.script[path] = [stall]
    words = ["gutenberg", "7", "--mirror", mirror.url]
    child = start(*words, cwd=tmp_path)
    part = tmp_path / "data" / "gutenberg" / "pg7.txt.part"
    while not (part.exists() and part.stat().st_size == 100_000):
        assert child.poll() is None
        time.sleep(0.02)
    child.send_signal(number)
    _, said = child.communicate(timeout=60)
    assert child.returncode == code
    assert said.splitlines()[-1] == "error: data/gutenberg: interrupted; the same command goes on from here"
    assert call(["data", "fetch", *words]) == 0
    assert mirror.ranges() == [None, "bytes=100000-"]
    assert (part.parent / "pg7.txt").read_text(encoding="utf-8") == BOOK and not part.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals there")
def test_bars_in_a_terminal_and_lines_elsewhere(
    mirror: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import pty

    def drop(handler: Any, content: bytes) -> None:
        handler.begin(200, {"Content-Length": str(len(content))})
        handler.wfile.write(content[:100_000])

    mirror.script["/cache/epub/7/pg7.txt"] = [drop]
    master, terminal = pty.openpty()
    words = ["gutenberg", "7", "--mirror", mirror.url]
    child = start(*words, cwd=tmp_path, stderr=terminal, TERM="xterm", COLUMNS="200")
    os.close(terminal)
    shown = b""
    with open(master, "rb", buffering=0) as screen, contextlib.suppress(OSError):  # noqa: PTH123  # ends with an error
        while piece := screen.read(1 << 16):
            shown += piece
    child.communicate(timeout=60)
    assert child.returncode == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "361.3/361.3 KiB" in text and "the connection ended after 100,000 of 370,000 bytes; trying" in text

    monkeypatch.setattr(Sparse, "due", lambda _: True)
    capsys.readouterr()
    assert gutenberg(mirror, "84") == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "pg84.txt: 361.3 KiB"
    assert re.fullmatch(r"pg84.txt: [\d.]+ KiB of 361.3 KiB \(\d+ %\), [\d.]+ [KMG]iB/s, [\d.]+ s left", lines[2])
    assert "361.3 KiB of 361.3 KiB (100 %)" in lines[-1]


def test_stories_from_the_hub_of_the_environment(site: Any, tmp_path: Path) -> None:
    """The whole command with the hub's own library, which reads where the hub is when it is loaded."""
    pytest.importorskip("huggingface_hub", reason="the extra data is not installed")
    api, files = "/api/datasets/roneneldan/TinyStories", {}
    for name in ("TinyStoriesV2-GPT4-valid.txt", "TinyStoriesV2-GPT4-train.txt"):
        files[name] = f"A story of {name}.\n<|endoftext|>\n".encode() * 500
        site.files[f"/datasets/roneneldan/TinyStories/resolve/{COMMIT}/{name}"] = files[name]
    stated = [
        {
            "type": "file",
            "path": name,
            "size": len(data),
            "oid": "0" * 40,
            "lfs": {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1},
        }
        for name, data in files.items()
    ]
    site.files[f"{api}/revision/v2"] = json.dumps({"id": "roneneldan/TinyStories", "sha": COMMIT}).encode()
    site.files[f"{api}/paths-info/{COMMIT}"] = json.dumps(stated).encode()
    child = start("tinystories", "--gpt4", "--revision", "v2", cwd=tmp_path, HF_ENDPOINT=site.url)
    printed, said = child.communicate(timeout=120)
    assert child.returncode == 0, said
    folder = tmp_path / "data" / "tinystories-gpt4"
    assert {path.name: path.read_bytes() for path in folder.glob("*.txt")} == files
    assert f"data/tinystories-gpt4: hub data set roneneldan/TinyStories at revision {COMMIT}" in printed
    assert "CDLA-Sharing-1.0" in printed
    last = printed.splitlines()[-1]
    assert last == "use it with: equipoise run tinystories --set 'corpus.path=\"data/tinystories-gpt4\"'"
    child = start("tinystories", "--out", "x", cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in child.communicate(timeout=120)[1] and child.returncode == 3


def test_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["data", "fetch", "tinystories"], ["data", "fetch", "gutenberg"]):
        assert call([*words, "--help"]) == 0
        assert f"Example: equipoise {' '.join(words)}" in capsys.readouterr().out
    assert call(["data"]) == 2 and "fetch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("preset", "command"),
    [
        ("tinystories", "equipoise data fetch tinystories"),
        ("ladder-cpu", "equipoise data fetch tinystories"),
        ("gutenberg-cpu", "equipoise data fetch gutenberg 11 84 98 145 345 1260 1342 1400 1661 2701"),
    ],
)
def test_a_study_without_its_text_says_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], preset: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(["run", preset]) == 2
    kind = command.split()[3]
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(
        f"error: corpus.path: not set; {kind} needs a folder of text, for example --set 'corpus.path="
    )
    assert said.endswith(f"; to get one: {command}")
    words = command.split()[4:]
    assert not words or books.read_numbers(words) == list(STARTING_BOOKS)
