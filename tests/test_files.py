"""Atomic files and locks between processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from equipoise.errors import ConfigError, IntegrityError, LockedError
from equipoise.files import describe_file, file_faults, held, read_json, write_bytes, write_json


def test_a_failed_write_leaves_the_old_content_and_no_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_bytes(path, b"new")
    assert read_json(path) == {"x": 1} and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_nan_never_reaches_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert not (tmp_path / "a.json").exists()


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe", b"null"])
def test_bad_json_is_an_error_naming_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(IntegrityError, match=r"a\.json"):
        read_json(tmp_path / "a.json")


def test_faults_of_files(tmp_path: Path) -> None:
    for name in ("same", "short", "other", "gone"):
        (tmp_path / name).write_bytes(b"abc")
    recorded = {path.name: describe_file(path) for path in tmp_path.iterdir()}
    (tmp_path / "short").write_bytes(b"ab")
    (tmp_path / "other").write_bytes(b"abd")
    (tmp_path / "gone").unlink()
    faults = "\n".join(sorted(file_faults(tmp_path, recorded)))
    assert faults == "gone: missing\nother: content differs from its recorded SHA-256\nshort: 2 bytes, recorded 3"


def test_a_file_where_a_folder_is_to_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "study.toml").touch()
    with pytest.raises(ConfigError) as refused, held(tmp_path / "study.toml" / ".study.lock", "study"):
        pass
    assert str(refused.value) == f"{tmp_path / 'study.toml'}: is a file; expected a folder, or a name that is free"


def test_a_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom equipoise.files import held\n"
        "with held(Path(sys.argv[1]), 'x'):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    path = tmp_path / "a.lock"
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    with (
        pytest.raises(LockedError, match=rf"the study: held by process {child.pid} on .+ since 20"),
        held(path, "the study"),
    ):
        pass
    child.kill()
    child.wait()
    child.stdout.close()
    with held(path, "the study"):
        pass
