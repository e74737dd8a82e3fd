"""Whatever stdout and stderr lead to: a reader who leaves, a full disk, an encoding of few characters, nothing."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from equipoise.cli.output import LOOKALIKES, Output, is_unicode
from equipoise.errors import EquipoiseError, ResourceError

SHOW = ["presets", "show", "quick"]


def call(*arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, **options.pop("environment", {})}
    return subprocess.run(
        [sys.executable, "-m", "equipoise", *arguments], env=environment, stderr=subprocess.PIPE, check=False, **options
    )


def shell(line: str) -> subprocess.CompletedProcess[bytes]:
    """A line of bash with `equipoise` in it; the exit code is that of `equipoise`."""
    whole = f'equipoise() {{ "{sys.executable}" -m equipoise "$@"; }}; {line}; exit "${{PIPESTATUS[0]}}"'
    return subprocess.run(["bash", "-c", whole], capture_output=True, check=False)


@pytest.mark.parametrize("arguments", ["presets show quick", "presets", "presets --json"])
def test_a_reader_who_leaves_is_no_error(arguments: str) -> None:
    done = shell(f"equipoise {arguments} | true")
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_exit_code_is_what_it_would_have_been_without_the_reader() -> None:
    done = shell("equipoise plan nowhere --json | true")
    assert done.returncode == 2 and done.stderr.startswith(b"error: nowhere: no such study file or preset")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [SHOW, ["presets", "--json"], ["--help"], ["presets"]])
def test_a_full_disk_is_one_line_and_7(arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = call(*arguments, stdout=full)
    assert done.returncode == 7
    assert done.stderr.decode() == "error: standard output: cannot be written (No space left on device)\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_error_keeps_its_own_exit_code_on_a_full_disk() -> None:
    with Path("/dev/full").open("wb") as full:
        done = call("plan", "nowhere", "--json", stdout=full)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: nowhere: no such study file or preset") and done.stderr.count(b"\n") == 1


def test_closed_outputs_are_no_error() -> None:
    done = shell("equipoise presets show quick >&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert shell("equipoise plan nowhere 2>&-").returncode == 2


def test_ascii_shows_what_looks_alike_and_json_keeps_every_character(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(call(*SHOW, stdout=subprocess.PIPE).stdout.decode(), encoding="utf-8")
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    change = ["--set", 'question="é × ±"']
    plain = call("plan", "s.toml", *change, stdout=subprocess.PIPE, environment=ascii_only, cwd=tmp_path)
    assert plain.returncode == 0 and plain.stderr == b""
    text = plain.stdout.decode("ascii")
    assert "\\xe9 x +-" in text and "3 arms x 3 seeds" in text and "-0.44 %" in text
    as_json = call("plan", "s.toml", *change, "--json", stdout=subprocess.PIPE, environment=ascii_only, cwd=tmp_path)
    assert json.loads(as_json.stdout.decode("ascii"))["question"] == "é × ±"
    helped = call("run", "--help", stdout=subprocess.PIPE, environment=ascii_only)
    assert helped.returncode == 0 and "every arm x seed x budget" in helped.stdout.decode("ascii")


@pytest.mark.parametrize(
    ("encoding", "known"), [("utf-8", True), ("UTF_8", True), ("utf-16", True), ("ascii", False), ("cp1252", False)]
)
def test_which_encodings_carry_everything(encoding: str, known: bool) -> None:
    assert is_unicode(io.TextIOWrapper(io.BytesIO(), encoding=encoding)) is known
    assert is_unicode(io.StringIO())


def test_lookalikes_are_ascii() -> None:
    assert all(len(c) == 1 and not c.isascii() and alike.isascii() for c, alike in LOOKALIKES.items())


@pytest.mark.parametrize(
    ("error", "strict", "raised"),
    [
        (BrokenPipeError(32, "gone"), True, None),
        (OSError(28, "full"), False, None),
        (OSError(28, "full"), True, ResourceError),
        (OSError(5, "Input/output error"), True, EquipoiseError),
    ],
)
def test_after_a_failure_everything_goes_nowhere(
    tmp_path: Path, error: OSError, strict: bool, raised: type[EquipoiseError] | None
) -> None:
    with (tmp_path / "out").open("w", encoding="utf-8") as file:

        class Failing:
            """Fails at its first write."""

            fileno = staticmethod(file.fileno)
            encoding = "utf-8"
            failed = False

            def write(self, text: str) -> int:
                if not self.failed:
                    Failing.failed = True
                    raise error
                return file.write(text)

            flush = staticmethod(file.flush)

        stream = Output(Failing(), "standard output", strict=strict)  # type: ignore[arg-type]
        assert stream.encoding == "utf-8"
        if raised:
            with pytest.raises(raised, match=rf"^standard output: cannot be written \({error.strerror}\)$"):
                stream.write("a")
        else:
            assert stream.write("a") == 1
        assert stream.write("later") == 5
        stream.flush()
        assert (tmp_path / "out").read_text(encoding="utf-8") == ""
