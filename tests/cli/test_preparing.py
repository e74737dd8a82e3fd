"""How far preparing has got, for people: a line that changes in a terminal, now and then one elsewhere, or nothing."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.cli import live
from equipoise.cli.preparing import Preparing, line
from equipoise.data.progress import Progress


def progress(
    stage: int = 1, done: int = 30_000_000, total: int | None = 90_000_000, rate: float | None = 5e6
) -> Progress:
    return Progress(stage=stage, done_bytes=done, total_bytes=total, bytes_per_s=rate)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (progress(), "data: learning the tokenizer (2 of 3): 30 of 90 MB (33 %), 5.0 MB/s, 12 s left"),
        (progress(0, rate=None), "data: reading (1 of 3): 30 of 90 MB (33 %)"),
        (progress(2, total=None), "data: encoding (3 of 3): 30 MB, 5.0 MB/s"),
        (progress(0, done=99_000_000), "data: reading (1 of 3): 90 of 90 MB (100 %), 5.0 MB/s"),
        (progress(2, done=0, total=0, rate=None), "data: encoding (3 of 3): 0 MB"),
    ],
)
def test_what_a_line_says(given: Progress, expected: str) -> None:
    assert line(given) == expected


def test_plain_lines_come_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with Preparing(quiet=False) as preparing:
        preparing.sparse = live.Sparse(clock=lambda: now)
        preparing.say("data: reading x")
        for second in range(60):
            now = second / 2
            preparing.show(progress(0, done=1_000_000 * second))
    assert capsys.readouterr().err.splitlines() == [
        "data: reading x",
        "data: reading (1 of 3): 30 of 90 MB (33 %), 5.0 MB/s, 12 s left",
    ]


def test_quiet_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Preparing(quiet=True) as preparing:
        preparing.sparse = live.Sparse(clock=iter(range(0, 10_000, 100)).__next__)
        preparing.say("data: reading x")
        preparing.show(progress())
    assert capsys.readouterr() == ("", "")


def test_in_a_terminal_a_line_that_leaves_nothing_behind(tmp_path: Path) -> None:
    code = """
import time
from equipoise.cli.preparing import Preparing
from equipoise.data.progress import Progress
with Preparing(quiet=False) as preparing:
    preparing.say("data: reading x")
    for step in range(4):
        preparing.show(Progress(stage=2, done_bytes=step * 10**7, total_bytes=9 * 10**7, bytes_per_s=5e6))
        time.sleep(0.3)
        if step == 1:
            preparing.say("data: said in between")
print("the end")
"""
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=child, stderr=child, env=environment) as process:
        os.close(child)
        shown = b""
        while True:
            try:
                data = os.read(parent, 4096)
            except OSError:  # Linux' way of saying that nobody holds the other end any more
                break
            if not data:
                break
            shown += data
        assert process.wait(30) == 0
    os.close(parent)
    text = shown.decode()
    assert "encoding (3 of 3): 10 of 90 MB (11 %), 5.0 MB/s, 16 s left" in text
    assert text.index("data: reading x") < text.index("encoding") < text.index("data: said in between")
    assert "\x1b[?25h" in text[text.rindex("encoding") :]  # the cursor is back
    assert text.endswith("\r\x1b[2Kthe end\r\n") or text.rindex("\x1b[2K") < text.index("the end")
