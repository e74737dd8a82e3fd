"""The live table at every size, the plain lines, and both as a terminal really shows them, through a pty."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import io
import itertools
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from equipoise.cli.live import Sparse, ending, frame, headline, health, line, whole_table
from equipoise.cli.progress import end
from equipoise.engine import Event, Task
from equipoise.watching import Health, Snapshot, State, Watched


def run_of(name: str, state: State = "waiting", **more: Any) -> Watched:
    return Watched(**{"name": name, "is_trunk": False, "state": state, "step": 0, "num_steps": 1000, **more})


BUSY = run_of(
    "moe/500000-s0", "training", step=244, loss=1.23456, eval_loss=1.25, lr=0.5, update_s=0.0123, tokens_per_s=83252.0,
    elapsed_s=3.0, left_s=9.3, routing=Health(busiest_frac=0.414, num_dead=2, collapsed=False),
)  # fmt: skip
RUNS = (
    BUSY,
    run_of("dense-active/500000-s0", "complete", step=1000, loss=1.3, eval_loss=1.31),
    run_of("dense-total/500000-s0", "failed", step=7, message="no space\x1b[2J left"),
    *(run_of(f"an-arm-with-a-long-name/500000-s{seed}") for seed in range(30)),
)


def snapshot(runs: tuple[Watched, ...] = RUNS, **more: Any) -> Snapshot:
    facts = {"directory": "runs/x", "study": "x", "state": "running", "held_by": "p", "command": None, "left_s": 83.0}
    return Snapshot(**{**facts, **more}, runs=runs)


def shown(renderable: Any, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, markup=False, emoji=False, highlight=False).print(renderable)
    return [text.rstrip() for text in file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [24, 40, 60, 79, 80, 100, 160])
@pytest.mark.parametrize("height", [8, 12, 24, 50])
def test_a_frame_fits_and_what_needs_somebody_stays(width: int, height: int) -> None:
    lines = shown(frame(snapshot(), width, height, notes=["a note " * 20], hint="Ctrl-C: leave"), width)
    assert len(lines) <= height and max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "\x1b[2J" not in text and lines[-1] == "Ctrl-C: leave"
    assert "244/1,000" in text
    if height < 50:
        assert re.search(r"^… and .*waiting", text, re.M) if width >= 40 else "… and " in text


def test_at_80_columns_all_that_counts_is_there() -> None:
    lines = shown(frame(snapshot(RUNS[:3]), 80, 24), 80)
    assert lines[0].startswith("x: 1 of 3 runs complete, 1 training, 1 failed, about 83 s left")
    assert lines[2].split() == ["run", "step", "loss", "tok/s", "left", "busiest", "expert"]
    assert re.split(r"  +", lines[3]) == ["moe/500000-s0", "244/1,000", "1.2346", "83,252", "9.3 s", "41 %, 2 dead"]
    assert re.split(r"  +", lines[4]) == ["dense-active/500000-s0", "1,000/1,000", "1.3000", "complete"]
    assert re.split(r"  +", lines[5]) == ["dense-total/500000-s0", "7/1,000", "failed"]
    assert lines[6] == "dense-total/500000-s0: failed: no space\\u001b[2J left"
    wide = shown(frame(snapshot(RUNS[:3]), 120, 24), 120)
    assert "val loss" in wide[2] and "1.2500" in wide[3]


def test_the_whole_table_has_every_run() -> None:
    assert len(shown(whole_table(snapshot(), 80), 80)) == len(RUNS) + 1


def test_headlines() -> None:
    assert headline(snapshot((), study=None, held_by="process 7 on a")) == "runs/x: being prepared by process 7 on a"
    nothing = snapshot((), study=None, held_by=None, state="not begun")
    assert headline(nothing) == "runs/x: no study has begun here (no lock.json)"
    stopped = snapshot((run_of("a/1-s0", "stopped"),), state="stopped", left_s=None)
    assert headline(stopped) == "x: 0 of 1 runs complete, 1 stopped, nobody is at work on it"


def test_plain_lines() -> None:
    assert line(BUSY) == (
        "step 244/1000 (24 %) loss 1.2346 validation loss 1.2500 lr 0.50× 12 ms/step 83,252 tok/s elapsed 3.0 s "
        "left 9.3 s busiest expert 41 %, 2 dead"
    )
    assert line(RUNS[5]) == "step 0/1000 (0 %)"
    assert health(Health(busiest_frac=1.0, num_dead=0, collapsed=True)) == "100 %, collapsed"
    assert (
        ending(RUNS[1]) == "complete, validation loss 1.3100" and ending(RUNS[2]) == "failed: no space\\u001b[2J left"
    )
    assert (
        ending(run_of("a", "complete")) == "complete, validation loss n/a"
        and ending(run_of("a", "stopped")) == "stopped"
    )


def test_plain_lines_become_rarer() -> None:
    now = [0.0]
    sparse = Sparse(lambda: now[0])
    due = []
    for second in range(4000):
        now[0] = float(second)
        due += [second] if sparse.due() else []
    assert due[:3] == [15, 30, 45] and len(due) < 90
    assert all(b - a >= 0.05 * b - 1 for a, b in itertools.pairwise(due))


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (0, "", "complete"),
        (129, "", "saved and stopped"),
        (130, "", "saved and stopped"),
        (143, "", "saved and stopped"),
        (4, "error: DIR: step 3: lm_loss is nan", "exit code 4: step 3: lm_loss is nan; see LOG"),
        (1, "Traceback", "exit code 1: gave no reason; see LOG"),
        (-9, "", "exit code -9: killed; did the system run out of memory?; see LOG"),
        (-11, "", "exit code -11: ended by signal 11; see LOG"),
    ],
)
def test_the_parent_says_why_a_child_failed(tmp_path: Path, tiny: Any, code: int, said: str, expected: str) -> None:
    log = tmp_path / "log"
    log.write_text(said.replace("DIR", str(tmp_path)) + "\n", encoding="utf-8")
    task = Task(run=tiny.runs[0], directory=tmp_path, log=log)
    assert end(Event(kind="finished", task=task, exit_code=code)) == expected.replace("LOG", str(log))


# ------------------------------------------------------------------------------------------------ a real terminal


class Terminal:
    """A command on a pty, and the cells its screen would hold: enough of a terminal for what rich writes."""

    def __init__(self, arguments: list[str], cwd: Path, columns: int, rows: int, **environment: str) -> None:
        self.master, slave = pty.openpty()
        self.resize(columns, rows)
        variables = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "equipoise", *arguments],
            cwd=cwd,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**variables, "TERM": "xterm-256color", **environment},
        )
        os.close(slave)
        self.raw = ""
        self.decoder = codecs.getincrementaldecoder("utf-8")()

    def resize(self, columns: int, rows: int) -> None:
        self.size = (columns, rows)
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if hasattr(self, "process"):
            self.process.send_signal(signal.SIGWINCH)

    def read(self, seconds: float) -> str:
        """What comes within some seconds, or until the command ends; it is added to `raw`."""
        until, new = time.monotonic() + seconds, ""
        while time.monotonic() < until:
            ready, _, _ = select.select([self.master], [], [], 0.05)
            if ready:
                try:
                    chunk = os.read(self.master, 65536)
                except OSError:  # Linux: the command has closed its side
                    break
                if not chunk:
                    break
                new += self.decoder.decode(chunk)
        self.raw += new
        return new

    def until(self, text: str, seconds: float = 60) -> list[str]:
        """The screen as soon as it holds `text`."""
        deadline = time.monotonic() + seconds
        while text not in "\n".join(self.screen()):
            assert time.monotonic() < deadline and (self.process.poll() is None or self.read(0.2)), self.raw[-3000:]
            self.read(0.2)
        return self.screen()

    def screen(self) -> list[str]:
        """The alternate screen after its last whole frame, else what was printed."""
        if "\x1b[?1049h" not in self.raw or "\x1b[?1049l" in self.raw:
            return plain(self.raw).splitlines()
        frames = self.raw.rsplit("\x1b[?1049h", 1)[1].split("\x1b[H")
        return plain(frames[-2] if len(frames) > 2 else "").replace("\r", "").splitlines()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@contextlib.contextmanager
def terminal(arguments: list[str], cwd: Path, columns: int = 100, rows: int = 20, **more: str) -> Iterator[Terminal]:
    one = Terminal(arguments, cwd, columns, rows, **more)
    try:
        yield one
    finally:
        one.close()


@pytest.fixture
def partly(begun: Any) -> Any:
    """A study of which one run is complete, one failed, one is at work (so this process says), and three wait."""
    complete, failed, working = begun.runs[:3]
    begun.finish(complete)
    begun.rows(failed, 2)
    begun.log(failed, "error: no space left")
    begun.rows(working, 4)
    begun.holds(begun.directory / working.arm / f".{working.folder.split('/')[1]}.lock")
    return begun


def test_watch_stays_calm_on_a_terminal_that_changes_its_size(partly: Any, tmp_path: Path) -> None:
    with terminal(["watch", "runs/tiny"], tmp_path) as one:
        lines = one.until("4/10")
        assert lines[0].startswith("tiny: 1 of 6 runs complete, 1 training, 1 failed, 3 waiting")
        assert any("failed: no space left" in text for text in lines) and len(lines) <= 20
        for columns, rows in ((60, 9), (30, 6), (140, 40)):
            one.resize(columns, rows)
            one.raw += one.read(0) or ""
            deadline = time.monotonic() + 30
            while len(frame_now := one.screen()) != rows or {len(text) for text in frame_now} != {columns}:
                one.read(0.3)
                assert time.monotonic() < deadline, frame_now
            assert frame_now[0].startswith("tiny: 1 of 6 runs") and any("4/10" in text for text in frame_now)
        begun_again = partly.runs[2]
        partly.rows(begun_again, 9, loss=3.0)
        one.until("9/10")
        one.process.send_signal(signal.SIGINT)
        one.read(20)
        assert one.process.wait(20) == 0
    assert one.raw.count("\x1b[?1049h") == one.raw.count("\x1b[?1049l") == 1
    assert one.raw.rindex("\x1b[?25h") > one.raw.rindex("\x1b[?25l"), "the cursor is back"
    after = plain(one.raw.split("\x1b[?1049l")[1])
    assert "Traceback" not in one.raw and after.count("waiting") == 4 and "exit code" not in after


def test_watch_killed_politely_leaves_the_terminal_as_it_was(partly: Any, tmp_path: Path) -> None:
    with terminal(["watch", "runs/tiny"], tmp_path) as one:
        one.until("4/10")
        one.process.terminate()
        one.read(20)
        assert one.process.wait(20) == 143 and one.raw.count("\x1b[?1049l") == 1


def test_watch_waits_on_a_terminal_for_a_study_to_begin_and_ends_when_it_is_finished(
    tiny: Any, begun: Any, tmp_path: Path
) -> None:
    hidden = begun.directory / "lock.json"
    lock = hidden.read_bytes()
    hidden.unlink()
    with terminal(["watch", "runs/tiny"], tmp_path) as one:
        one.until("no study has begun here (no lock.json)")
        for run in begun.runs:
            begun.finish(run)
        hidden.write_bytes(lock)
        one.read(30)
        assert one.process.wait(30) == 0
    assert "tiny: 6 of 6 runs complete" in one.raw.split("\x1b[?1049l")[1]
    assert "verdicts and report: equipoise report runs/tiny" in one.raw


def test_a_dumb_terminal_and_no_color(partly: Any, tmp_path: Path) -> None:
    (partly.directory / "moe" / f".{partly.runs[2].folder.split('/')[1]}.holder").unlink()
    with terminal(["watch", "runs/tiny"], tmp_path, TERM="dumb") as one:
        one.read(30)
        assert one.process.wait(30) == 0
    assert "\x1b[?1049h" not in one.raw and "tiny: 1 of 6 runs complete" in one.raw
    with terminal(["presets"], tmp_path, NO_COLOR="1", columns=60) as one:
        one.read(30)
        assert one.process.wait(30) == 0
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|9[0-7]|38;)", one.raw)
    assert max(map(len, plain(one.raw).replace("\r", "").splitlines())) <= 60


def test_run_shows_a_table_and_leaves_what_happened(
    equipoise: Any, tiny: Any, tiny_toml: str, tiny_cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "study.toml").write_text(tiny_toml, encoding="utf-8")
    short = ["--set", "seeds=[0]", "--cache", str(tiny_cache), "--jobs", "1"]
    with terminal(["run", "study.toml", *short], tmp_path, columns=80) as one:
        one.read(120)
        assert one.process.wait(60) == 0, one.raw
    before, rest = one.raw.split("\x1b[?1049h")
    screen, after = rest.split("\x1b[?1049l")
    assert "2 runs, 0 done" in before and "Ctrl-C: save and stop" in plain(screen)
    said = plain(after).replace("\r", "")
    assert "[1/2] moe/5120-s0: complete\n[2/2] dense/5120-s0: complete\n" in said
    assert "Contracts: gaps in validation loss" in said and "Traceback" not in one.raw
    assert max(map(len, said.splitlines())) <= 80 or "report: " in said


# ------------------------------------------------------------------------------------------------ no terminal


def test_watch_elsewhere_prints_lines_and_ends_with_the_work(partly: Any, equipoise: Any, tmp_path: Path) -> None:
    working = partly.runs[2]
    note = partly.directory / working.arm / f".{working.folder.split('/')[1]}.holder"
    child = subprocess.Popen(
        [sys.executable, "-m", "equipoise", "watch", "runs/tiny"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    first = child.stdout.readline().decode()
    assert first.startswith(f"[1/6] {working.folder}: step 4/10 (40 %) loss 4.96")
    partly.finish(working)
    note.unlink()
    rest, said = child.communicate(timeout=60)
    assert child.returncode == 0 and f"[2/6] {working.folder}: complete, validation loss 4.2500" in rest.decode()
    assert "tiny: 2 of 6 runs complete, 1 failed, 3 waiting, nobody is at work on it" in rest.decode()
    assert "dense/5120-s0: failed: no space left" in rest.decode() and b"\x1b" not in rest + said
    assert said.decode() == "to go on, or to try again what failed: equipoise run study.toml\n"


def test_watch_as_json_is_one_snapshot_in_every_state(partly: Any, equipoise: Any, tmp_path: Path) -> None:
    seen = json.loads(equipoise("watch", "runs/tiny", "--json", cwd=tmp_path).stdout)
    assert seen["state"] == "running" and [run["state"] for run in seen["runs"]].count("waiting") == 3
    assert seen["runs"][2]["routing"] == {"busiest_frac": 0.45, "num_dead": 1, "collapsed": False}
    (tmp_path / "empty").mkdir()
    nothing = equipoise("watch", "empty", "--json", cwd=tmp_path)
    assert nothing.returncode == 0 and json.loads(nothing.stdout)["state"] == "not begun"
    told = equipoise("watch", "empty", cwd=tmp_path)
    assert told.returncode == 0 and "to begin one there: equipoise run STUDY --out empty" in told.stderr
    missing = equipoise("watch", "nowhere", "--json", cwd=tmp_path)
    assert missing.returncode == 2 and json.loads(missing.stdout)["error"]["exit_code"] == 2
