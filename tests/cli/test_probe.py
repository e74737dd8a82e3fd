"""`probe` as a user types it, and what finished runs keep for the explorer of their report."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from equipoise.cli import probe as module

MOE, DENSE = "runs/tiny/moe/5120-s0", "runs/tiny/dense/5120-s0"


def test_for_programs_it_is_what_evaluate_says_token_by_token(equipoise: Any, finished: Path, tmp_path: Path) -> None:
    text = "Once é 猫\n"
    found = json.loads(equipoise("probe", MOE, DENSE, text, "--json", cwd=finished).stdout)
    assert found["schema_version"] == 1 and found["text"] == text
    moe, dense = found["runs"]
    assert (moe["run"], moe["arm"], moe["seed"], moe["step"], moe["best"]) == (MOE, "moe", 0, 10, False)
    assert (moe["num_experts"], moe["top_k"], moe["num_layers"]) == (3, 2, 1) and dense["num_experts"] == 0
    assert b"".join(bytes.fromhex(token["bytes"]) for token in moe["tokens"]) == text.encode()
    assert "\\xc3" in {token["text"] for token in moe["tokens"]}  # é was never seen in training: two tokens
    for token in moe["tokens"]:
        (layer,) = token["layers"]
        assert len(set(layer["experts"])) == 2 and set(layer["experts"]) <= {0, 1, 2}
        assert sum(layer["weights"]) == pytest.approx(1, abs=1e-6) and layer["weights"][0] >= layer["weights"][1]
    assert all(token["layers"] == [] for token in dense["tokens"])
    (tmp_path / "story.txt").write_text(text, encoding="utf-8")
    for run in (moe, dense):
        losses = [token["loss"] for token in run["tokens"]]
        assert run["loss"] == pytest.approx((sum(losses) + run["end_loss"]) / (len(losses) + 1))
        done = equipoise("evaluate", run["run"], "--text", str(tmp_path / "story.txt"), "--json", cwd=finished)
        assert run["loss"] == pytest.approx(json.loads(done.stdout)["loss"], abs=1e-5)


def test_for_people_runs_of_one_tokenizer_stand_under_one_line_of_tokens(equipoise: Any, finished: Path) -> None:
    done = equipoise("probe", MOE, DENSE, "Once\n", "--weights", cwd=finished)
    assert done.returncode == 0 and done.stderr == "" and "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert re.fullmatch(
        rf"{MOE}, step 10 \(3 experts, top-2\): \d\.\d{{4}} nats/token over \d token\(s\) and the end", lines[0]
    )
    assert lines[1].startswith(f"{DENSE}, step 10 (dense): ")
    tokens, *rows = lines[3:7]
    assert tokens.split()[-2:] == ["⏎", "(end)"]
    assert [row[:14].strip() for row in rows] == ["moe s0 loss", "moe s0 layer 0", "dense s0 loss"]
    assert re.search(r"layer 0( +[012]:\.\d\d [012]:\.\d\d)+$", rows[1])
    assert len(rows[0].split()) - 3 == len(tokens.split())
    plain = equipoise("probe", MOE, "Once\n", "--layer", "0", cwd=finished).stdout
    assert re.search(r"^layer 0( +[012] [012])+$", plain, re.MULTILINE) and "moe s0" not in plain


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([MOE, ""], 2, "TEXT: empty; expected at least one character"),
        ([MOE, DENSE, "a", "--layer", "1"], 2, "--layer 1: expected 0 to 0"),
        ([DENSE, "a", "--layer", "0"], 2, "--layer 0: these runs are dense; expected no --layer"),
        (["runs/tiny", "a"], 2, "runs/tiny: no run directory; expected one that holds a config.json"),
        (["", "a"], 2, 'RUN "": expected a path; the current folder is written .'),
        ([MOE, "a", "--device", "tpu"], 2, "--device tpu: expected auto, cpu or cuda; did you mean 'cpu'?"),
        ([MOE, "a\udcff"], 3, "text holds a lone surrogate U+DCFF at character 1; expected Unicode text"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    equipoise: Any, finished: Path, arguments: list[str], code: int, message: str
) -> None:
    done = equipoise("probe", *arguments, cwd=finished)
    assert (done.returncode, done.stderr) == (code, f"error: {message}\n")


# ------------------------------------------------------------------------------------------------ on a terminal


def drawn(monkeypatch: pytest.MonkeyPatch, width: int, **options: Any) -> str:
    """Seven tokens of a made-up run as a terminal of this width shows them."""
    target = io.StringIO()
    monkeypatch.setattr(
        module, "out", lambda: Console(file=target, width=width, highlight=False, markup=False, **options)
    )
    tokens = ["Once", " upon", "猫", "\n", "[red]x", "\u202e", "e"]
    row = {
        "arm": "moe",
        "seed": 0,
        "num_experts": 12,
        "num_layers": 2,
        "end_loss": 1.0,
        "tokens": [
            {
                "loss": 0.5 * place,
                "layers": [{"experts": [place + layer, 0], "weights": [0.9, 0.1]} for layer in (0, 5)],
            }
            for place in range(len(tokens))
        ],
    }
    module._print_blocks(
        [module.token_label(token) for token in tokens] + ["(end)"], module._rows(row, None, False, named=False)
    )
    return target.getvalue()


def test_blocks_fit_the_terminal_and_columns_stay_under_their_token(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = drawn(monkeypatch, 44)
    assert all(len(line) <= 44 for line in shown.splitlines())
    assert shown == (
        "         Once  ␣upon  猫    ⏎     [red]x\n"
        "loss     0.00  0.50   1.00  1.50  2.00\n"
        "layer 0  0 0   1 0    2 0   3 0   4 0\n"
        "layer 1  5 0   6 0    7 0   8 0   9 0\n"
        "\n"
        "         \\u202e  e     (end)\n"
        "loss     2.50    3.00  1.00\n"
        "layer 0  5 0     6 0\n"
        "layer 1  10 0    11 0\n"
        "\n"
    )


def test_experts_have_colours_on_a_terminal_unless_none_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = drawn(monkeypatch, 200, force_terminal=True, color_system="truecolor", _environ={})
    assert "\x1b[30;48;2;230;159;0m0 0\x1b[0m" in shown  # expert 0: black on orange
    assert "\x1b[30;48;2;230;159;0m8 0\x1b[0m" in shown  # and 8, whose number tells them apart
    assert "48;2" not in drawn(
        monkeypatch, 200, force_terminal=True, color_system="truecolor", _environ={"NO_COLOR": "1"}
    )


# ------------------------------------------------------------------------------------------------ what runs keep


def bits(text: str, num_tokens: int, num_experts: int) -> list[set[int]]:
    """The experts of each token, one bit after the other."""
    raw = base64.b64decode(text)
    found: list[set[int]] = []
    for token in range(num_tokens):
        found.append(set())
        for expert in range(num_experts):
            place = token * num_experts + expert
            if raw[place // 8] >> (7 - place % 8) & 1:
                found[-1].add(expert)
    return found


def test_saturation_is_counted_from_the_choices_in_the_record(finished: Path) -> None:
    rows = [json.loads(line) for line in (finished / MOE / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    kept = [row["chosen"] for row in rows if row["kind"] == "eval"]
    assert {row["tokens"] for row in kept} == {kept[0]["tokens"]} and 0 < kept[0]["tokens"] <= 512
    choices = [bits(row["layers"][0], row["tokens"], 3) for row in kept]
    assert all(len(experts) == 2 for point in choices for experts in point)
    expected = []
    for point in choices:
        shared = 0
        for early, final in zip(point, choices[-1], strict=True):
            shared += len(early & final)
        expected.append([shared / (2 * len(point))])
    results = json.loads((finished / "runs/tiny/results.json").read_text(encoding="utf-8"))
    (entry,) = [row for row in results["routing"] if row["seed"] == 0]
    assert [point["saturation"] for point in entry["points"]] == expected and expected[-1] == [1.0]


def test_the_explorer_shows_every_arm_on_the_same_text(finished: Path) -> None:
    results = json.loads((finished / "runs/tiny/results.json").read_text(encoding="utf-8"))
    found = results["explorer"]
    assert (found["seed"], found["budget"]) == (0, 5120)
    moe, dense = found["arms"]
    assert [(arm["arm"], arm["num_experts"], len(arm["layers"])) for arm in (moe, dense)] == [
        ("moe", 3, 1),
        ("dense", 0, 0),
    ]
    assert [story["tokens"] for story in moe["stories"]] == [story["tokens"] for story in dense["stories"]]
    for arm in (moe, dense):
        folder = finished / "runs/tiny" / arm["arm"] / "5120-s0"
        stored = json.loads((folder / "explorer.json").read_text(encoding="utf-8"))
        assert {"stories": arm["stories"], "layers": arm["layers"]} == stored
        assert "explorer.json" in json.loads((folder / "summary.json").read_text(encoding="utf-8"))["files"]
    page = (finished / "runs/tiny/report.html").read_text(encoding="utf-8")
    assert page.count('class="tokens"') == 2 * len(moe["stories"])


def test_the_explorer_agrees_with_probe(equipoise: Any, finished: Path) -> None:
    story = json.loads((finished / MOE / "explorer.json").read_text(encoding="utf-8"))["stories"][0]
    text = "".join(story["tokens"])
    (run,) = json.loads(equipoise("probe", MOE, text, "--json", cwd=finished).stdout)["runs"]
    assert [token["text"] for token in run["tokens"]] == story["tokens"]
    assert [round(token["loss"], 4) for token in run["tokens"]] == story["losses"]
    assert [[token["layers"][0]["experts"] for token in run["tokens"]]] == story["experts"]
