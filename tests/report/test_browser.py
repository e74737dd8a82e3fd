"""The report in a real browser: nothing of a study's texts acts, nothing is fetched, and everything of ours works.

Chromium is driven through its DevTools protocol over two pipes: no driver, no socket, no download. Where there is no
Chromium these tests are skipped; on Debian and Ubuntu `apt install chromium` brings it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from scipy.stats import t as student_t

from equipoise.report.page import render_html

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="the browser is driven over POSIX pipes"),
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium found; on Debian and Ubuntu: apt install chromium"),
]

NAMES = ("ordinary", "hostile", "quick")
PATIENCE_S = 90  # of one answer, on a machine that does much else
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
)  # fmt: skip
# Chromium reads commands from descriptor 3 and writes answers to 4.
LAUNCH = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One Chromium process; `open` shows a file in a fresh page and makes that the page all other calls are about."""

    def __init__(self, profile: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        command = [sys.executable, "-c", LAUNCH, str(theirs_in), str(theirs_out), str(PROGRAM), *FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            self.call("Browser.close")
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of one command; events that arrive meanwhile are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self.events.append(answer)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            read = os.read(self._in, 1 << 20) if ready else b""
            if not read:
                raise TimeoutError("the browser does not answer")
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def open(self, path: Path, *, width: int = 1400, dark: bool = False, script: bool = True) -> None:
        """Show a file in a new page, loaded and drawn; earlier events are forgotten."""
        self._session = None
        page = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        self.events.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        metrics = {"height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", width=width, **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.setLifecycleEventsEnabled", enabled=True)
        loader = self.call("Page.navigate", url=path.as_uri())["loaderId"]
        deadline = time.monotonic() + PATIENCE_S
        while not any(
            (event["loaderId"], event["name"]) == (loader, "load") for event in self.happened("Page.lifecycleEvent")
        ):
            self.events.append(self._next(deadline))
        if script:
            self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is worth in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def happened(self, *methods: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event.get("method") in methods]

    def press(self, key: str, times: int = 1) -> None:
        code = {"Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "Escape": 27}[key]
        for _ in range(times):
            for kind in ("rawKeyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def mouse(self, kind: str, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """A mouse event at a place within an element, in shares of its width and height."""
        box = self.value(
            f"(e => {{ e.scrollIntoView({{block: 'center', behavior: 'instant'}}); const b = e.getBoundingClientRect();"
            f" return [b.x + {across} * b.width, b.y + {down} * b.height]; }})(document.querySelector({selector!r}))"
        )
        pressed = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], **pressed)

    def click(self, selector: str) -> None:
        self.mouse("mousePressed", selector)
        self.mouse("mouseReleased", selector)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


QUICK = ("--jobs=1", "--set=budgets=[20_480]", "--set=seeds=[0]", "--set=corpus.num_documents=400",
         "--set=corpus.num_validation=20", "--set=corpus.num_selection=4")  # fmt: skip
"""What makes the preset `quick` short: one seed, twenty updates a run, and a corpus that is just enough for them."""
TOKENS = [
    "Once", " upon", "\n", "<script>", "</script>", "</bdi><script>alert(1)</script><img src=x onerror=alert(2)>",
    "{{7*7}}", "$x_$", "\u2028", "\u202e\u200f", "\x00", "שלום", "\u202eabc", "\ud800", "long" * 30, "{% raw %}",
]  # fmt: skip


@pytest.fixture(scope="session")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the preset `quick`, really run by the command line, shortened by `QUICK`."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own  # one run for all test processes
    report = shared / "quick" / "report.html"
    with FileLock(shared / "quick.lock"):
        if not report.exists():
            done = subprocess.run(
                [sys.executable, "-m", "equipoise", "run", "quick", *QUICK, "--quiet", "--device=cpu",
                 "--cache", str(shared / "cache"), "--out", str(report.parent)],
                cwd=shared, capture_output=True, encoding="utf-8", timeout=240, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
    return report.parent


@pytest.fixture(scope="session")
def studies(
    _made: dict[str, Any], hostile: dict[str, Any], explorer: Callable[..., dict[str, Any]], quick: Path
) -> dict[str, dict[str, Any]]:
    """The results behind each page: an ordinary study, one whose texts and tokens are attacks, and a real one."""
    return {
        "ordinary": {**few(_made), "explorer": explorer(_made, [" token", *TOKENS[:3], *"abcde"])},
        "hostile": {**few(hostile), "explorer": explorer(hostile, TOKENS)},
        "quick": json.loads((quick / "results.json").read_text(encoding="utf-8")),
    }


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory, studies: dict[str, dict[str, Any]], quick: Path) -> dict[str, Path]:
    """The reports as files; that of `quick` is the one its run has written."""
    folder = tmp_path_factory.mktemp("reports")
    found = {"quick": quick / "report.html"}
    for name in ("ordinary", "hostile"):
        found[name] = folder / f"{name}.html"
        found[name].write_text(render_html(studies[name]), encoding="utf-8")
    return found


def few(results: dict[str, Any]) -> dict[str, Any]:
    """All of a study but most routing figures, which take long to draw."""
    return {**results, "routing": results["routing"][:2]}


# ------------------------------------------------------------------------------------------------ nothing acts


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_nothing_asks_for_nothing_and_fits(
    browser: Browser, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    browser.open(pages[name], width=width, dark=dark)
    said = browser.happened("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
    assert said == []
    assert browser.happened("Page.javascriptDialogOpening") == []
    asked = [request["request"]["url"] for request in browser.happened("Network.requestWillBeSent")]
    assert asked == [pages[name].as_uri()]
    assert browser.value("document.documentElement.scrollWidth") == width
    assert browser.value("document.querySelectorAll('.plot .drawing path').length") > 6  # the script has drawn
    assert browser.value("document.querySelectorAll('script').length") == 3
    light = browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert light != dark


def test_hostile_names_are_shown_by_the_script_as_they_are(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["hostile"])
    names = browser.value("[...document.querySelectorAll('#plot-0 .readings th')].map(cell => cell.textContent)")
    assert names[:2] == ["$x_$collapsed", "_base2 of 3 finished"]
    assert names[2].startswith('<script>alert(1)</script>"><img src=x onerror=alert(2)>{{7*7}}')
    assert browser.value("document.querySelectorAll('img, .readings script').length") == 0


def test_the_policy_stops_what_an_escaping_fault_would_let_in(
    browser: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    """Markup is put into a finished page by hand: scripts, handlers, styles, an image; and a server listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        site = f"http://127.0.0.1:{server.getsockname()[1]}"
        evil = (
            f"<script>window.ran = 1</script><script src='{site}/a.js'></script>"
            f"<img src='{site}/a.png' onerror='window.ran = 2'>"
            "<svg onload='window.ran = 3'></svg><p id='painted' style='color: rgb(1, 2, 3)'>p</p>"
            f"<style>#painted {{ color: rgb(1, 2, 3) }}</style><link rel='stylesheet' href='{site}/a.css'>"
        )
        path = tmp_path / "evil.html"
        source = pages["ordinary"].read_text(encoding="utf-8")
        path.write_text(source.replace("</h1>", f"</h1>{evil}", 1), encoding="utf-8")
        browser.open(path)
        assert select.select([server], [], [], 0)[0] == []  # nobody has called
    assert browser.value("window.ran") is None
    assert browser.value("getComputedStyle(document.getElementById('painted')).color") != "rgb(1, 2, 3)"
    assert len(browser.happened("Log.entryAdded")) >= 6  # one complaint for each
    assert browser.value("document.querySelectorAll('.plot .drawing path').length") > 6  # ours still runs
    assert not browser.value(
        "(() => { try { document.body.innerHTML = '<b>x</b>'; return true } catch { return false } })()"
    )


# ------------------------------------------------------------------------------------------------ what works


def texts(browser: Browser, selector: str) -> list[str]:
    found = browser.value(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)")
    return [str(text) for text in found]


def test_each_choice_redraws_every_plot(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["ordinary"])
    assert "training tokens (millions)" in texts(browser, "#plot-1 text")
    assert browser.value("document.querySelectorAll('#plot-1 .mean').length") == 3
    assert browser.value("document.querySelectorAll('#plot-0 .seed').length") == 1  # the run that diverged
    browser.click("label[for=curve-show-seeds]")
    assert browser.value("document.querySelectorAll('#plot-1 .seed').length") == 9
    assert browser.value("document.querySelectorAll('#plot-1 .mean').length") == 0
    browser.click("label[for=curve-axis-flops]")
    assert "training FLOPs (×10¹⁵)" in texts(browser, "#plot-1 text")
    browser.click("label[for=curve-axis-seconds]")
    assert "training time (hours)" in texts(browser, "#plot-1 text")
    before = texts(browser, "#plot-1 text")
    browser.click("label[for=curve-scale-log]")
    assert texts(browser, "#plot-1 text") != before
    assert browser.value("document.querySelectorAll('#plot-1 .seed').length") == 9


def test_the_pointer_reads_the_mean_and_its_interval(
    browser: Browser, pages: dict[str, Path], _made: dict[str, Any]
) -> None:
    own = [c["points"] for c in _made["curves"] if c["arm"] == "moe" and c["budget"] == 426_300_000]
    at_end = [points[-1]["loss"] for points in own]
    half = student_t.ppf(0.975, 2) * statistics.stdev(at_end) / 3**0.5
    mean = statistics.mean(at_end)
    browser.open(pages["ordinary"])
    assert texts(browser, "#plot-1 .readings .reading")[:2] == [
        "At the end; training tokens (millions): 426.3",
        f"{mean:.4f} [{mean - half:.4f} to {mean + half:.4f}]",
    ]
    browser.mouse("mouseMoved", "#plot-1 .drawing", across=0.5)
    where, value = texts(browser, "#plot-1 .readings .reading")[:2]
    tokens = float(where.removeprefix("training tokens (millions): "))
    (near,) = [
        [p["loss"] for p in same] for same in zip(*own, strict=True) if abs(same[0]["tokens"] / 1e6 - tokens) < 0.1
    ]
    assert 180 < tokens < 250 and value.startswith(f"{statistics.mean(near):.4f} [")
    assert browser.value("document.querySelectorAll('#plot-1 .cursor-dot').length") == 3
    browser.mouse("mouseMoved", "h1")
    assert browser.value("document.querySelectorAll('#plot-1 .cursor').length") == 0


def test_everything_is_reached_and_moved_by_keys(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["ordinary"])
    browser.value("document.getElementById('curve-axis-tokens').focus()")
    browser.press("ArrowRight")
    assert browser.value("document.activeElement.id") == "curve-axis-flops"
    assert "training FLOPs (×10¹⁵)" in texts(browser, "#plot-1 text")
    browser.press("Tab", 3)  # the other two choices, then the first plot
    assert browser.value("document.activeElement.getAttribute('role')") == "slider"
    read = "document.activeElement.getAttribute('aria-valuetext')"
    last = browser.value(read)
    assert "dense-total 1." in last
    browser.press("ArrowLeft", 6)
    assert browser.value(read) != last
    browser.press("Home")
    assert browser.value("document.activeElement.getAttribute('aria-valuenow')") == "0"
    browser.press("Escape")
    assert browser.value(read) == last
    stops = browser.value("document.querySelectorAll('a[href], input, summary, [tabindex=\"0\"]').length")
    seen = set()
    browser.value("document.activeElement.blur()")
    for _ in range(stops + 2):
        browser.press("Tab")
        seen.add(browser.value("document.activeElement.closest('section')?.id || document.activeElement.tagName"))
    assert {"verdicts", "results", "arms", "curves", "gaps", "routing", "explorer", "samples", "provenance"} - seen <= {
        "verdicts"
    }


def test_the_curves_of_a_real_study_follow_pointer_and_keys(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["quick"])
    (title,) = [text for text in texts(browser, "#plot-0 text") if text.startswith("training tokens")]
    assert browser.value("document.querySelectorAll('#plot-0 .mean').length") == 3
    browser.click("label[for=curve-show-seeds]")
    assert browser.value("document.querySelectorAll('#plot-0 .mean').length") == 0
    assert browser.value("document.querySelectorAll('#plot-0 .seed').length") == 3
    browser.click("label[for=curve-axis-flops]")
    assert title not in texts(browser, "#plot-0 text")
    browser.press("ArrowLeft")
    assert browser.value("document.activeElement.id") == "curve-axis-tokens"
    assert title in texts(browser, "#plot-0 text")
    before = texts(browser, "#plot-0 text")
    browser.press("Tab")
    browser.press("ArrowRight")
    assert browser.value("document.activeElement.id") == "curve-scale-log"
    assert texts(browser, "#plot-0 text") != before
    browser.press("Tab", 2)
    read = "document.activeElement.getAttribute('aria-valuetext')"
    last = browser.value(read)
    browser.press("ArrowLeft")
    assert "dense-total " in last and browser.value(read) != last


class Explorer:
    """The explorer of a page, and what its first story has to show by the results behind the page."""

    def __init__(self, browser: Browser, results: dict[str, Any]) -> None:
        self._browser = browser
        self.arms = results["explorer"]["arms"]
        self.layers = len(self.arms[0]["stories"][0]["experts"])
        self.length = browser.value(f"{self.tokens(0)}.length")

    @staticmethod
    def tokens(column: int) -> str:
        return f"[...document.querySelectorAll('.story .column')[{column}].querySelectorAll('.tk')]"

    def numbers(self, column: int) -> list[str]:
        found = self._browser.value(f"{self.tokens(column)}.map(token => token.querySelector('sub').textContent)")
        return list(found)[: len(self.arms[column]["stories"][0]["tokens"])]

    def told(self) -> list[str]:
        return texts(self._browser, ".story:nth-of-type(1) .readout > *")

    def experts(self, column: int, layer: int) -> list[str]:
        return [" ".join(map(str, chosen)) for chosen in self.arms[column]["stories"][0]["experts"][layer]]

    def said(self, column: int, place: int, layer: int | None) -> str:
        """What the readout has to say of a token: `arm: loss 0.10; layer 0: expert 1 at 0.75, …`."""
        story = self.arms[column]["stories"][0]
        line = f"{self.arms[column]['arm']}: loss {story['losses'][place]:.2f}"
        if layer is None or not story["experts"]:
            return line
        pairs = zip(story["experts"][layer][place], story["weights"][layer][place], strict=True)
        return f"{line}; layer {layer}: " + ", ".join(f"expert {expert} at {weight:.2f}" for expert, weight in pairs)

    def place(self) -> int:
        return int(self._browser.value(f"{self.tokens(0)}.indexOf(document.activeElement)"))


@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("name", NAMES)
def test_the_explorer_follows_the_pointer(
    browser: Browser, pages: dict[str, Path], studies: dict[str, Any], name: str, width: int
) -> None:
    browser.open(pages[name], width=width)
    explorer = Explorer(browser, studies[name])
    assert explorer.layers == 2
    losses = explorer.numbers(1)  # of a dense arm, whatever is chosen
    assert explorer.numbers(0) == explorer.experts(0, 0) and "." in losses[0]
    browser.click("#explorer .picker input[value='1'] + span")
    assert explorer.numbers(0) == explorer.experts(0, 1) != explorer.experts(0, 0)
    for place in (1, 4):
        browser.mouse("mouseMoved", f".story .column .tk:nth-of-type({place + 1}) bdi")
        assert explorer.told()[1:] == [explorer.said(column, place, 1) for column in range(3)]
        assert browser.value(f"{explorer.tokens(2)}[{place}].classList.contains('on')")
        assert browser.value(f"{explorer.tokens(0)}.findIndex(token => token.matches(':hover'))") == place  # not moved
    browser.click("#explorer .picker input[value='loss'] + span")
    assert all("." in number for number in explorer.numbers(0)) and explorer.numbers(1) == losses
    assert browser.value(f"{explorer.tokens(0)}[1].title") == explorer.said(0, 1, None).partition(": ")[2]
    browser.click("#explorer .picker input[value='0'] + span")
    assert explorer.numbers(0) == explorer.experts(0, 0)
    assert browser.value("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("name", NAMES)
def test_the_explorer_follows_the_keys(
    browser: Browser, pages: dict[str, Path], studies: dict[str, Any], name: str
) -> None:
    browser.open(pages[name])
    explorer = Explorer(browser, studies[name])
    browser.value("document.querySelector('#explorer .picker input:checked').focus()")
    browser.press("ArrowRight")
    assert explorer.numbers(0) == explorer.experts(0, 1)
    browser.press("ArrowRight")
    assert all("." in number for number in explorer.numbers(0))
    browser.press("ArrowRight")  # round to the first
    assert explorer.numbers(0) == explorer.experts(0, 0)
    browser.press("Tab")
    assert explorer.place() == 0
    browser.press("ArrowRight", 2)
    browser.press("ArrowLeft")
    assert explorer.place() == 1
    assert explorer.told()[1:] == [explorer.said(column, 1, 0) for column in range(3)]
    assert browser.value(f"{explorer.tokens(0)}.filter(token => token.tabIndex === 0).length") == 1
    browser.press("End")
    assert explorer.place() == explorer.length - 1
    assert browser.value(f"{explorer.tokens(2)}[{explorer.length - 1}].classList.contains('on')")
    browser.press("ArrowRight")
    assert explorer.place() == explorer.length - 1
    browser.press("Home")
    assert explorer.place() == 0
    places = "[...document.querySelectorAll('.readout')].map(readout => getComputedStyle(readout).position)"
    first, *others = browser.value(places)  # a readout follows its text once it has something to say
    assert first == "sticky" and set(others) <= {"static"}
    browser.press("Tab")  # one stop for each arm's text
    assert browser.value(f"{explorer.tokens(1)}.indexOf(document.activeElement)") == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_readout_covers_no_token_that_the_keys_reach(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name], width=400)
    browser.value("document.documentElement.style.scrollBehavior = 'auto'")
    covered = (
        f"{Explorer.tokens(0)}.filter(token => {{ token.focus();"
        " const readout = document.querySelector('.story .readout').getBoundingClientRect();"
        " const box = token.getBoundingClientRect();"
        " return box.top < 0 || (box.bottom > readout.top && box.top < readout.bottom); }).map(e => e.textContent)"
    )
    assert browser.value(covered) == []


def test_hostile_tokens_are_shown_and_told_as_they_are(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["hostile"])
    shown = texts(browser, ".story .column:nth-of-type(1) .tk bdi")[: len(TOKENS)]
    unseen = ["\\u2028", "\\u202e\\u200f", "\\u0000", "שלום", "\\u202eabc", "\\ud800"]
    assert shown == ["Once", " upon", "⏎", *TOKENS[3:8], *unseen, *TOKENS[14:]]
    for place in range(len(TOKENS)):
        browser.value(f"{Explorer.tokens(0)}[{place}].focus()")
        assert texts(browser, ".story .readout b")[0] == f"“{shown[place]}”"
    assert browser.value("document.querySelectorAll('#explorer img, #explorer script').length") == 0


def test_a_choice_of_run_shows_that_run_alone(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["ordinary"])
    shown = "[...document.querySelectorAll('#samples .pane')].map(pane => pane.offsetHeight > 0)"
    assert browser.value(shown) == [True] + [False] * 5
    browser.click("label[for=sample-2]")
    assert browser.value(shown) == [False, False, True, False, False, False]


def test_without_its_script_the_page_shows_still_figures(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["ordinary"], script=False)
    browser.call("Emulation.setScriptExecutionDisabled", value=False)  # so that questions can be asked
    assert browser.value("document.querySelectorAll('.plot > .figure svg').length") == 2
    assert browser.value("document.getElementById('curve-choices').offsetHeight") == 0


def test_in_print_everything_is_there(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["ordinary"], dark=True)
    browser.call("Emulation.setEmulatedMedia", media="print")
    heights = browser.value("[...document.querySelectorAll('.pane, .table')].map(e => e.offsetHeight)")
    assert len(heights) > 20 and min(heights) > 0
    assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.value("document.querySelector('nav').offsetHeight") == 0
    paper = base64.b64decode(browser.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69)["data"])
    assert paper.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", paper)) >= 5


@pytest.mark.parametrize("name", NAMES)
def test_a_narrow_page_names_every_value_of_a_row(browser: Browser, pages: dict[str, Path], name: str) -> None:
    """A row is then a list; no table has to be moved sideways, and it is still a table for a screen reader."""
    browser.open(pages[name], width=400)
    browser.value("document.querySelectorAll('details').forEach(item => { item.open = true })")
    wide = browser.value(
        "[...document.querySelectorAll('.table .scroll')].filter(e => e.scrollWidth > e.clientWidth)"
        ".map(e => e.getAttribute('aria-label'))"
    )
    assert wide == []
    assert browser.value("document.documentElement.scrollWidth") == 400
    label = (
        "getComputedStyle(document.querySelector('#results td[data-heading=\"bits per byte\"]'), '::before').content"
    )
    assert browser.value(label) == '"bits per byte"'
    browser.call("Accessibility.enable")
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = {node["role"]["value"] for node in tree if not node["ignored"]}
    assert {"table", "row", "cell", "rowheader", "slider"} <= roles


@pytest.mark.parametrize("name", ["ordinary", "quick"])  # a hostile name may be wider than any page
def test_at_full_width_nothing_is_cut(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name], width=1400)
    browser.value("document.querySelectorAll('details').forEach(item => { item.open = true })")
    cut = browser.value(
        "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth)"
        ".map(e => e.getAttribute('aria-label'))"
    )
    assert cut == []


RULE = "document.styleSheets[0].insertRule({!r}, document.styleSheets[0].cssRules.length)"


@pytest.mark.parametrize("name", NAMES)
def test_a_narrow_page_fits_in_wide_letters_as_well(browser: Browser, pages: dict[str, Path], name: str) -> None:
    """How wide a letter is depends on the fonts a reader has: those of the page are a wish."""
    browser.open(pages[name], width=400)
    browser.value(RULE.format("body { letter-spacing: 0.12em }"))
    browser.value("document.querySelectorAll('details').forEach(item => { item.open = true })")
    assert browser.value("document.documentElement.scrollWidth") == 400


def test_a_wide_table_takes_the_free_margin_before_it_is_moved_sideways(
    browser: Browser, pages: dict[str, Path]
) -> None:
    """Wide by what fonts a reader has, for instance."""
    inside = (
        "(e => [e.clientWidth, e.scrollWidth, e.getBoundingClientRect().right])"
        "(document.querySelector('#results .table .scroll'))"
    )
    ends = []
    for width in (900, 1150, 1500):
        for needed in (1010, 1150, 1300):
            browser.open(pages["ordinary"], width=width)
            browser.value(RULE.format(f".table table {{ min-width: {needed}px }}"))
            room, content, right = browser.value(inside)
            assert browser.value("document.documentElement.scrollWidth") == width
            text = min(width, 1060) - 2 * 28
            most = text + max(0, (width - 1060) / 2)
            assert room == pytest.approx(min(max(text, needed), most), abs=1)
            assert content == pytest.approx(max(room, needed), abs=1) and right <= width - 28 + 1
            ends.append(content > room + 1)
    assert ends == [True, True, True, False, True, True, False, False, True]
