"""`export` and `evaluate` as a user types them: what they print, write and refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN = "runs/tiny/moe/5120-s0"


def test_export_writes_a_directory_once(equipoise: Any, finished: Path, tmp_path: Path) -> None:
    done = equipoise("export", RUN, str(tmp_path / "out"), cwd=finished)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path / 'out'}: MixtralForCausalLM, ") and "weights of step 10" in done.stdout
    again = equipoise("export", RUN, str(tmp_path / "out"), "--json", cwd=finished)
    assert again.returncode == 2 and "exists already; expected a directory that does not" in again.stderr
    assert json.loads(again.stdout)["error"]["kind"] == "ConfigError"


def test_export_for_programs(equipoise: Any, finished: Path, tmp_path: Path) -> None:
    done = equipoise("export", "runs/tiny/dense/5120-s1", str(tmp_path / "out"), "--best", "--json", cwd=finished)
    written = json.loads(done.stdout)
    summary = json.loads((finished / "runs/tiny/dense/5120-s1/summary.json").read_text(encoding="utf-8"))
    assert written["schema_version"] == 1 and written["model_type"] == "llama"
    assert written["step"] == summary["best_step"] and written["num_parameters"] == summary["params"]["total"]
    assert set(written["files"]) == {path.name for path in (tmp_path / "out").iterdir()}


def test_export_needs_neither_torch_nor_transformers(finished: Path, tmp_path: Path) -> None:
    script = (
        "import sys\nsys.modules['torch'] = sys.modules['transformers'] = None\nsys.argv[0] = 'equipoise'\n"
        "from equipoise.cli.main import main\nmain()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "export", RUN, str(tmp_path / "out")],
        cwd=finished,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("command", [["export", "runs/tiny", "out"], ["evaluate", "runs/tiny", "--text", "study.toml"]])
def test_something_else_than_a_run_is_refused(equipoise: Any, finished: Path, command: list[str]) -> None:
    done = equipoise(*command, cwd=finished)
    assert done.returncode == 2 and "runs/tiny: no run directory; expected one that holds a config.json" in done.stderr
    assert not (finished / "out").exists()


def test_evaluate_scores_a_file(equipoise: Any, finished: Path, tmp_path: Path) -> None:
    story = "Once upon a time, there was a dog. É!\n"
    (tmp_path / "story.txt").write_text(story, encoding="utf-8")
    found = json.loads(equipoise("evaluate", RUN, "--text", str(tmp_path / "story.txt"), "--json", cwd=finished).stdout)
    assert (found["documents"], found["bytes"], found["step"], found["context"]) == (1, len(story.encode()), 10, 256)
    assert found["files"][0]["name"] == "story.txt" and len(found["files"][0]["sha256"]) == 64
    assert 0 < found["loss"] < 12 and 0 < found["bpb"] < 20
    shown = equipoise("evaluate", RUN, "--text", str(tmp_path / "story.txt"), "--quiet", cwd=finished)
    assert f"step 10: {found['loss']:.4f} nats/token, {found['bpb']:.4f} bits per byte (1 document(s), " in shown.stdout
    assert shown.stderr == ""


def test_the_ways_files_hold_documents(equipoise: Any, finished: Path, tmp_path: Path) -> None:
    """The same two stories as lines of a .jsonl, as TinyStories, and as a folder of files: the same score."""
    stories = ["Once there was a cat.", "Once there was a dog.\nIt ran."]
    lines = "".join(json.dumps({"story": story}) + "\n" for story in stories)
    (tmp_path / "stories.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "stories.txt").write_text("\n<|endoftext|>\n".join(stories), encoding="utf-8")
    (tmp_path / "folder").mkdir()
    for number, story in enumerate(stories):
        (tmp_path / "folder" / f"{number}.txt").write_text(story, encoding="utf-8")
    asked = [["stories.jsonl", "--field", "story"], ["stories.txt", "--kind", "tinystories"], ["folder"]]
    scores = []
    for path, *options in asked:
        done = equipoise("evaluate", RUN, "--text", str(tmp_path / path), *options, "--json", cwd=finished)
        found = json.loads(done.stdout)
        scores.append([found[name] for name in ("documents", "tokens", "bytes", "loss", "bpb")])
    assert scores[0] == scores[1] == scores[2] and scores[0][0] == 2


@pytest.mark.parametrize(
    ("arguments", "exit_code", "said"),
    [
        (
            ["--text", "nowhere.txt"],
            3,
            "--text: nowhere.txt does not exist; expected a .txt, .jsonl or .parquet file, or",
        ),
        (["--text", "lines.jsonl"], 3, "no field 'text'; fields there: 'story'; name the right one with --field"),
        (["--text", "empty.txt"], 3, "no text; expected at least one document that is not empty"),
        (["--text", "empty.txt", "--kind", "poem"], 2, "--kind poem: expected one of text, tinystories, gutenberg"),
        (["--text", "empty.txt", "--device", "tpu"], 2, "--device tpu: expected auto, cpu or cuda"),
        ([], 2, "--text"),
    ],
)
def test_evaluate_says_what_is_wrong(
    equipoise: Any, finished: Path, tmp_path: Path, arguments: list[str], exit_code: int, said: str
) -> None:
    (tmp_path / "lines.jsonl").write_text('{"story": "x"}\n', encoding="utf-8")
    (tmp_path / "empty.txt").touch()
    done = equipoise("evaluate", str(finished / RUN), *arguments, cwd=tmp_path)
    assert done.returncode == exit_code and said in done.stderr and "Traceback" not in done.stderr
