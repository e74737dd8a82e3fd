"""Every other command: what it prints, its JSON, its exit code."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from equipoise.cli.doctor import EXTRAS
from equipoise.cli.plan import claim_text
from equipoise.spec.study import preset_names

ROOT = Path(__file__).resolve().parent.parent.parent


def test_plan_writes_nothing_and_shows_matches(equipoise: Any, tmp_path: Path, tiny_toml: str) -> None:
    (tmp_path / "study.toml").write_text(tiny_toml, encoding="utf-8")
    done = equipoise("plan", "study.toml", "--cache", str(tmp_path / "none"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["study.toml"]
    assert "moe on active_params" in done.stdout and "(estimated)" in done.stdout
    assert "time: not measured" in done.stdout and "claim moe-lower: moe lower than dense on val_loss" in done.stdout


def test_plan_of_published_study_needs_no_corpus(equipoise: Any) -> None:
    done = equipoise("plan", "tinystories")
    assert done.returncode == 0 and "epochs: unknown until corpus.path is set" in done.stdout
    for figure in (
        "14,772,736",
        "21,064,192",
        "14,886,216",
        "+0.77 %",
        "21,056,000",
        "−0.04 %",
        "14,764,544",
        "−0.06 %",
    ):
        assert figure in done.stdout


def test_plan_takes_certain_counts_from_the_cache(equipoise: Any, finished: Path, tiny: Any) -> None:
    done = equipoise("plan", "study.toml", "--json", cwd=finished)
    planned = json.loads(done.stdout)
    assert planned["data_certain"] and planned["train_tokens"] == len(tiny.dataset.tokens("train"))
    assert planned["schema_version"] == 1 and planned["vocab_size"] == tiny.dataset.vocab_size


def test_plan_probes_in_a_child(equipoise: Any, finished: Path) -> None:
    planned = json.loads(equipoise("plan", "study.toml", "--probe", "--jobs", "2", "--json", cwd=finished).stdout)
    arms = planned["time"]["arms"]
    assert set(arms) == {"moe", "dense"} and planned["time"]["jobs"] == 2
    for arm in arms.values():
        assert arm["updates_s"] == pytest.approx(30 * arm["update_s"])
        assert all(arm[part] > 0 for part in ("start_s", "curve_s", "samples_s", "final_s"))
    total = sum(arm["total_s"] for arm in arms.values())
    assert total / 2 <= planned["time"]["study_s"] < total
    shown = equipoise("plan", "study.toml", "--probe", "--jobs", "1", cwd=finished).stdout
    assert "with 1 run(s) at a time" in shown and "final scoring" in shown
    assert "the curve costs 16.7 % of the training; at most 5 % with recipe.curve_tokens = 153 or less" in shown


def test_bench_sizes_every_preset(equipoise: Any) -> None:
    found = json.loads(equipoise("bench", "--quick", "--device", "cpu", "--json").stdout)
    assert {row["name"] for row in found["studies"]} == set(preset_names())
    assert found["gemm_flops"] > 1e8 and found["arms"][0]["measured"]
    for row in found["studies"]:
        assert row["fits_in_an_hour"] == (row["study_s"] <= 3600)
        assert row["final_scoring"] == row["name"].startswith(("quick", "gutenberg", "lr-fairness-cpu"))
    updates = {(arm["study"], arm["arm"]): arm["update_s"] for arm in found["arms"]}
    assert updates["tinystories", "moe"] > 100 * updates["tinystories-cpu", "moe"]


@pytest.mark.parametrize("jobs", ["0", "-1", "many", "1.5", ""])
def test_jobs_are_auto_or_a_number(equipoise: Any, jobs: str) -> None:
    for command in ("run", "plan"):
        done = equipoise(command, "quick", f"--jobs={jobs}")
        assert done.returncode == 2 and f"--jobs {jobs}: expected auto or a whole number of at least 1" in done.stderr


def test_plan_of_a_missing_corpus_is_a_data_error(equipoise: Any) -> None:
    done = equipoise("plan", "tinystories-cpu", "--set", 'corpus.path="nowhere"')
    assert done.returncode == 3 and "nowhere" in done.stderr and "Traceback" not in done.stderr


def test_run_without_a_corpus_says_what_to_set(equipoise: Any, tmp_path: Path) -> None:
    done = equipoise("run", "tinystories-cpu", cwd=tmp_path)
    assert done.returncode == 2 and "corpus.path: not set" in done.stderr
    assert not list((tmp_path / "runs").rglob("*.json")) if (tmp_path / "runs").exists() else True


def test_all_faults_of_a_study_at_once_with_exit_2(equipoise: Any, tmp_path: Path, tiny_toml: str) -> None:
    broken = tiny_toml.replace("num_layers = 1", "num_layer = 1").replace("top_k = 2", "top_k = 9")
    (tmp_path / "study.toml").write_text(broken, encoding="utf-8")
    done = equipoise("run", "study.toml", "--json", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean 'num_layers'?" in done.stderr and "top_k" in done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["exit_code"] == 2 and error["kind"] == "ConfigError"
    assert [path.name for path in tmp_path.iterdir()] == ["study.toml"]


def test_status_lists_every_run(equipoise: Any, finished: Path) -> None:
    done = equipoise("status", "runs/tiny", cwd=finished)
    assert done.returncode == 0 and "6 of 6 runs complete" in done.stdout and "moe/5120-s0" in done.stdout
    rows = json.loads(equipoise("status", "runs/tiny", "--json", cwd=finished).stdout)["runs"]
    assert len(rows) == 6 and all(row["step"] == 10 for row in rows)
    nowhere = equipoise("status", "nowhere", cwd=finished)
    assert nowhere.returncode == 2 and "nowhere: no such folder" in nowhere.stderr
    unlocked = equipoise("status", "runs", cwd=finished)
    assert unlocked.returncode == 5 and "no lock.json there" in unlocked.stderr


def test_report_is_rebuilt_byte_for_byte(equipoise: Any, finished: Path) -> None:
    files = [finished / "runs" / "tiny" / name for name in ("results.json", "results.md", "report.html")]
    before = [path.read_bytes() for path in files]
    for path in files:
        path.unlink()
    done = equipoise("report", "runs/tiny", cwd=finished)
    assert done.returncode == 0 and "report.html" in done.stderr
    assert [path.read_bytes() for path in files] == before


def test_sample_continues_a_prompt_the_same_way_each_time(equipoise: Any, finished: Path) -> None:
    run = "runs/tiny/moe/5120-s0"
    first = json.loads(equipoise("sample", run, "Once", "--tokens", "5", "--json", cwd=finished).stdout)
    again = equipoise("sample", run, "Once", "--tokens", "5", cwd=finished)
    assert first["text"].startswith("Once") and again.stdout == first["text"] + "\n" and first["step"] == 10
    hot = [
        equipoise("sample", run, "Once", "--tokens", "8", "--temperature", "1", "--seed", s, cwd=finished).stdout
        for s in "001"
    ]
    assert hot[0] == hot[1] != hot[2]
    wrong = equipoise("sample", "runs/tiny", "Once", cwd=finished)
    assert wrong.returncode == 2 and "no run directory" in wrong.stderr


def test_train_one_run_of_a_study(equipoise: Any, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_bytes((finished / "study.toml").read_bytes())
    done = equipoise("train", "study.toml", "--arm", "dense", "--seed", "1", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    stored = json.loads((finished / "runs/tiny/dense/5120-s1/summary.json").read_text(encoding="utf-8"))
    assert summary["val_loss"] == stored["val_loss"] and summary["digest"] == stored["digest"]
    again = equipoise("train", "runs/tiny/dense/5120-s1", cwd=tmp_path)
    assert again.returncode == 0 and "already complete" in again.stderr
    for arguments, said in (
        (["study.toml", "--arm", "dens", "--seed", "1"], "--arm dens: expected one of moe, dense"),
        (["study.toml", "--arm", "moe"], "--seed: missing; expected one of 0, 1, 2"),
        (["study.toml", "--arm", "moe", "--seed", "0", "--budget", "7"], "--budget 7: expected one of 5120"),
        (["runs/tiny/dense/5120-s1", "--set", "recipe.optim.lr=9"], "are a study's"),
        (["study.toml", "--arm", "moe", "--seed", "0", "--device", "tpu"], "expected auto, cpu or cuda"),
    ):
        wrong = equipoise("train", *arguments, cwd=tmp_path)
        assert wrong.returncode == 2 and said in wrong.stderr


def test_presets_are_listed_shown_and_copied_once(equipoise: Any, tmp_path: Path) -> None:
    listed = json.loads(equipoise("presets", "--json").stdout)["presets"]
    assert {"quick", "tinystories", "tinystories-cpu", "gutenberg", "gutenberg-cpu"} <= {row["name"] for row in listed}
    done = equipoise("presets", "copy", "quick", "mine.toml", cwd=tmp_path)
    assert done.returncode == 0
    copied = (tmp_path / "mine.toml").read_text(encoding="utf-8")
    shown = equipoise("presets", "show", "quick").stdout
    assert copied.count("#") > 10 and copied == shown.replace('= "quick"', '= "mine"', 1) != shown
    again = equipoise("presets", "copy", "quick", "mine.toml", cwd=tmp_path)
    assert again.returncode == 2 and "exists already" in again.stderr
    assert equipoise("presets", "copy", "quik", "other.toml", cwd=tmp_path).returncode == 2


def test_doctor_says_what_is_there(equipoise: Any) -> None:
    done = equipoise("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 0 and all(check["ok"] for check in checks.values())
    assert "float32" in checks["device"]["found"] or "bfloat16" in checks["device"]["found"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wanted = [needed for extra, group in extras.items() if extra != "dev" for needed in group]
    names = {re.split("[<>=]", needed)[0].replace("-", "_") for needed in wanted}
    assert names == set(EXTRAS) < set(checks)


def test_usage_errors_exit_2_and_help_has_an_example(equipoise: Any) -> None:
    missing = equipoise("plan", "--json")
    assert missing.returncode == 2 and "plan --help" in missing.stderr and "Traceback" not in missing.stderr
    assert json.loads(missing.stdout)["error"]["kind"] == "UsageError"
    assert equipoise("nonsense").returncode == 2 and equipoise("run", "quick", "--jobs", "x").returncode == 2
    bare = equipoise()
    assert bare.returncode == 2 and "Commands" in bare.stdout + bare.stderr
    for command in ("run", "plan", "status", "report", "train", "sample", "doctor"):
        helped = equipoise(command, "--help")
        assert helped.returncode == 0 and "Example: equipoise" in helped.stdout, command


def test_what_people_do_before_and_after_training_never_loads_torch(equipoise: Any, finished: Path) -> None:
    """plan, status, report and presets with a torch that cannot be imported."""
    import subprocess
    import sys

    script = (
        "import sys\nsys.modules['torch'] = None\nsys.argv = ['equipoise', *sys.argv[1:]]\n"
        "from equipoise.cli.main import main\nmain()\n"
    )
    for arguments in (["plan", "study.toml"], ["status", "runs/tiny"], ["report", "runs/tiny"], ["presets"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            cwd=finished,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
        assert done.returncode == 0, (arguments, done.stderr)


def test_a_plan_that_repeats_the_data_often_warns(equipoise: Any, finished: Path) -> None:
    done = equipoise("plan", "study.toml", "--set", "budgets=[512_000]", cwd=finished)
    assert done.returncode == 0 and "warning: 512,000 tokens repeat the training data 26." in done.stdout


def test_no_traceback_when_the_place_cannot_be_written(equipoise: Any, tmp_path: Path, tiny_toml: str) -> None:
    (tmp_path / "study.toml").write_text(tiny_toml, encoding="utf-8")
    (tmp_path / "runs").write_text("a file in the way", encoding="utf-8")
    done = equipoise("run", "study.toml", cwd=tmp_path)
    assert done.returncode == 1 and "runs" in done.stderr and "Traceback" not in done.stderr


def test_power_plans_the_next_study(equipoise: Any, finished: Path) -> None:
    done = equipoise("power", "runs/tiny", "--gap", "0.02", cwd=finished)
    assert done.returncode == 0, done.stderr
    assert "Seeds needed: tiny" in done.stdout and "moe − dense" in done.stdout
    found = json.loads(equipoise("power", "runs/tiny", "--json", cwd=finished).stdout)
    assert found["contrasts"][0]["claim"] == "moe-lower" and found["contrasts"][0]["n"] == 3
    refused = equipoise("power", "runs/tiny", "--alpha", "2", cwd=finished)
    assert refused.returncode == 2 and "--alpha 2.0: expected between 0 and 1" in refused.stderr


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        (
            {"kind": "equivalent", "left": ["a", "b"], "metric": "val_loss", "equivalence_margin": 0.02},
            "a, b equivalent to r on val_loss within 0.02",
        ),
        (
            {"kind": "lower", "left": "a", "metric": "log_z", "margin": 0.0, "equivalence_margin": None},
            "a lower than r on log_z",
        ),
        (
            {"kind": "lower", "left": "a", "metric": "val_loss", "margin": 0.01, "equivalence_margin": 0.05},
            "a lower than r on val_loss by more than 0.01 (else within 0.05)",
        ),
        ({"kind": "faster", "left": "a", "metric": "val_loss"}, "a faster than r on val_loss"),
        (
            {"kind": "trend", "left": "a", "metric": "val_bpb", "direction": "narrows"},
            "lead of a over r narrows with the budget on val_bpb",
        ),
        (
            {
                "kind": "routing", "arm": "a", "metric": "log_z", "direction": "below", "threshold": 2.5,
                "layers": "max", "at_frac": 0.05,
            },
            "log_z of a (max over layers, after 5 % of training) below 2.5",
        ),
    ],
)  # fmt: skip
def test_a_plan_says_every_kind_of_claim(claim: dict[str, Any], said: str) -> None:
    assert claim_text({"right": "r", **claim}) == said
