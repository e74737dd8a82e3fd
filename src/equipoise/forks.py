"""Children forked from a process that has loaded everything: a run starts in tenths of a second instead of two.

Linux alone, and only while that process has one thread: threads do not survive a fork, locks they hold do. Elsewhere
`engine` starts a new interpreter for every run. Not for: what runs there (`engine` and the command line know).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

POLL_S: Final = 0.05
"""Seconds between two looks at what has ended."""
SIGNALS: Final = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
WARNINGS: Final = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
"""With which schedulers warn every process of a job; whoever asked for the children knows what to do."""
ONE_THREAD: Final = "OPENBLAS_NUM_THREADS"
"""NumPy's library starts threads when it is loaded; where this environment variable is 1 it starts none."""
START_S: Final = 60.0
"""Seconds after which a process that does not answer is given up; loading takes two."""


class Child(Protocol):
    """What is needed of a process, whoever started it: as `subprocess.Popen` has it."""

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""

    def wait(self) -> int:
        """Exit code, once it has one."""

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""

    def kill(self) -> None:
        """Send it SIGKILL, unless it has ended."""


# ------------------------------------------------------------------------------------------------ the asking side


@dataclass(kw_only=True)
class Nursery:
    """The process that forks; `codes` are the exit codes it has reported."""

    server: subprocess.Popen[bytes]
    codes: dict[int, int] = field(default_factory=dict)
    asked: int = 0
    unread: bytes = b""

    def start(self, arguments: Sequence[str], log: Path) -> Child | None:
        """A child that runs the command line with `arguments`, output appended to `log`; None when it cannot fork."""
        assert self.server.stdin is not None
        self.asked += 1
        request = {"number": self.asked, "arguments": list(arguments), "log": str(log)}
        try:
            self.server.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            return None
        while (answer := self._read(START_S)) is not None:
            if answer.get("number") == self.asked:
                return _Forked(pid=answer["started"], nursery=self) if answer["started"] else None
        self.server.kill()  # whatever it would still do, nobody waits for
        return None

    def close(self) -> None:
        """Nothing is forked any more, and children that still run are told to end, once, whatever happens later."""
        assert self.server.stdin is not None
        self.server.stdin.close()

    def look(self) -> None:
        """Take note of what has ended."""
        while self._read(0) is not None:
            pass

    def _read(self, seconds: float) -> dict[str, Any] | None:
        """The next answer; None when none comes within `seconds`."""
        assert self.server.stdout is not None
        while b"\n" not in self.unread:
            ready, _, _ = select.select([self.server.stdout], [], [], seconds)
            more = os.read(self.server.stdout.fileno(), 65_536) if ready else b""
            if not more:
                return None
            self.unread += more
        line, _, self.unread = self.unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "ended" in answer:
            self.codes[answer["ended"]] = answer["code"]
        return answer


@dataclass(frozen=True, kw_only=True)
class _Forked:
    pid: int
    nursery: Nursery

    def poll(self) -> int | None:
        self.nursery.look()
        if self.pid not in self.nursery.codes and self.nursery.server.poll() is not None and not _is_alive(self.pid):
            self.nursery.codes[self.pid] = 1  # nobody is left to say how it ended; its record tells whether it is whole
        return self.nursery.codes.get(self.pid)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            select.select([], [], [], POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # ended, and nobody has asked how


def can_fork() -> bool:
    """Whether `nursery` gives one on this system."""
    return sys.platform == "linux"


@contextmanager
def nursery(environment: Mapping[str, str]) -> Iterator[Nursery | None]:
    """A process to fork from; None where that is not done. When it is left, children that still run are told to end.

    `environment` is that of this process. The nursery is started with ONE_THREAD beside it, which is for loading alone:
    the command line takes it away before anything is forked.
    """
    if not can_fork():
        yield None
        return
    server = subprocess.Popen(
        [sys.executable, "-m", "equipoise", "nursery"],
        env={**environment, ONE_THREAD: "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,  # nothing is left to be written when the server has gone
        start_new_session=True,  # a Ctrl-C in the terminal is for the parent
    )
    try:
        yield Nursery(server=server)
    finally:
        assert server.stdin is not None and server.stdout is not None
        server.stdin.close()  # a second time does nothing
        server.wait()
        server.stdout.close()


# ------------------------------------------------------------------------------------------------ the forking side


def serve(command: Callable[[Sequence[str]], int]) -> None:
    """Fork a child for every line of stdin and report on stdout when it has ended, until stdin is closed.

    A child runs `command` with the arguments of the line and exits with what it returns. When stdin is closed the
    children get SIGTERM and are waited for. Signals meant for all processes of a job are left to the others: whoever
    asks closes stdin when there is nothing left to wait for.
    """
    for number in (*SIGNALS, *WARNINGS):
        signal.signal(number, signal.SIG_IGN)
    channel = os.dup(1)
    os.dup2(2, 1)  # what anybody prints is no answer
    running: set[int] = set()
    unread, closed = b"", False
    while not closed or running:
        if select.select([0] if not closed else [], [], [], POLL_S)[0]:
            more = os.read(0, 65_536)
            unread, closed = unread + more, not more
            for pid in running if closed else ():
                os.kill(pid, signal.SIGTERM)
        while b"\n" in unread:
            line, _, unread = unread.partition(b"\n")
            request = json.loads(line)
            pid = _fork(command, request["arguments"], request["log"], channel)
            running |= {pid} if pid else set()
            _answer(channel, {"number": request["number"], "started": pid})
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                _answer(channel, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _answer(channel: int, answer: dict[str, int]) -> None:
    with suppress(BrokenPipeError):  # whoever asked is gone; stdin is closed then too
        os.write(channel, json.dumps(answer).encode() + b"\n")


def _fork(command: Callable[[Sequence[str]], int], arguments: Sequence[str], log: str, channel: int) -> int:
    """The child's process id; 0 when there is more than one thread, or no memory for a child."""
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        return 0
    try:
        pid = os.fork()
    except OSError:
        return 0
    if pid == 0:
        _be_child(command, arguments, log, channel)
    return pid


def _be_child(command: Callable[[Sequence[str]], int], arguments: Sequence[str], log: str, channel: int) -> NoReturn:
    code = 1
    try:
        for restored in SIGNALS:
            signal.signal(restored, signal.SIG_DFL)
        os.setsid()
        os.close(channel)
        null, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for number, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(number, target)
        code = command(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # whatever it is: this is the end of the process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
