"""What holds of every command: help, one JSON document, odd arguments, completion, tables that fit; and what belongs to
one of them alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main

from equipoise import errors
from equipoise.cli import console
from equipoise.cli.console import one_of, parts, print_table, prose
from equipoise.cli.main import EPILOG, app, call
from equipoise.config import digest
from equipoise.errors import ConfigError, IntegrityError
from equipoise.lock import read_lock
from equipoise.record import read_config, read_run


def commands(tree: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command that people can see, by its words."""
    tree = tree or typer.main.get_command(app)
    for name, command in tree.commands.items():
        if not command.hidden:
            yield " ".join((*path, name)), command
            if hasattr(command, "commands"):
                yield from commands(command, (*path, name))


COMMANDS = dict(commands())

# ------------------------------------------------------------------------------------------------ help


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call([*name.split(), "--help"]) == 0
    said = capsys.readouterr().out
    example = re.search(r"Example: equipoise ([a-z ]+)", said)
    assert example and example[1].startswith(name), "the example is of this very command"
    for parameter in COMMANDS[name].params:
        assert parameter.name == "help" or parameter.help, f"{name}: {parameter.name} has no help"
        assert max(parameter.opts, key=len) in said or parameter.param_type_name == "argument"


def test_help_lists_every_exit_code_and_so_does_the_docstring_of_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    branches = [errors.EquipoiseError, *errors.EquipoiseError.__subclasses__()]
    codes = {0, 129, 130, 143, *(branch.exit_code for branch in branches)}
    assert {int(code) for code in re.findall(r"(?:^|· |: |, |and )(\d+) ", EPILOG)} == codes
    assert all(re.search(rf"\b{code}\b", said) for code in codes)
    assert all(re.search(rf"\b{code}\b", errors.__doc__ or "") for code in codes - {0})


# ------------------------------------------------------------------------------------------------ JSON

WORKING = {
    "run": "run study.toml",
    "plan": "plan study.toml",
    "status": "status runs/tiny",
    "watch": "watch runs/tiny",
    "report": "report runs/tiny",
    "archive": "archive runs/tiny archived",
    "power": "power runs/tiny",
    "presets": "presets",
    "presets show": "presets show quick",
    "presets copy": "presets copy quick new.toml",
    "train": "train runs/tiny/moe/5120-s0",
    "sample": "sample runs/tiny/moe/5120-s0 Once --tokens 2",
    "evaluate": "evaluate runs/tiny/moe/5120-s0 --text story.txt",
    "export": "export runs/tiny/moe/5120-s0 exported",
    "doctor": "doctor",
    "selftest": "selftest",
    "bench": "bench --quick",
}
"""A call of every command that works in the folder of the finished study."""
FAILING = {
    "run": "run nowhere",
    "plan": "plan study.toml --set recipe.seq_le=1",
    "status": "status nowhere",
    "watch": "watch nowhere",
    "report": "report nowhere",
    "archive": "archive nowhere archived",
    "power": "power runs/tiny --alpha 7",
    "presets": "presets shw",
    "presets show": "presets show quik",
    "presets copy": "presets copy quick study.toml",
    "train": "train study.toml --arm dens --seed 0",
    "sample": "sample runs/tiny Once",
    "evaluate": "evaluate runs/tiny/moe/5120-s0 --text nowhere",
    "export": "export nowhere exported",
    "doctor": "doctor --frobnicate",
    "selftest": "selftest --device tpu",
    "bench": "bench --device tpu",
}


@pytest.fixture
def study(finished: Path, tmp_path: Path, tiny_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finished study's folder as the current folder; what measures for minutes answers at once."""
    import equipoise.selftest
    import equipoise.sizing

    shutil.copytree(finished, tmp_path / "study")
    (tmp_path / "study" / "story.txt").write_text("Once there was a fox.", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "study")
    monkeypatch.setenv("EQUIPOISE_CACHE", str(tiny_cache))
    monkeypatch.setattr(equipoise.selftest, "run_checks", lambda device: (SimpleNamespace(reason="cpu"), []))
    machine = SimpleNamespace(compute="cpu", jobs=1, gemm_flops=1.0, arms=[], studies=[])
    monkeypatch.setattr(equipoise.sizing, "size_machine", lambda *_, **__: vars(machine))
    return tmp_path / "study"


def test_every_command_that_takes_json_is_tried() -> None:
    takers = {name for name, command in COMMANDS.items() if any("--json" in p.opts for p in command.params)}
    doers = {name for name, command in COMMANDS.items() if getattr(command, "invoke_without_command", True)}
    assert takers == doers, "every command speaks to programs, but for those that only lead to others"
    new = takers - set(WORKING)
    elsewhere = {"probe", "compare", "data fetch tinystories", "data fetch gutenberg"}
    assert set(WORKING) == set(FAILING) <= takers and not new - elsewhere, "add a call above"


@pytest.mark.parametrize("name", WORKING)
def test_json_is_one_document_and_nothing_else(study: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    for words, code in ((WORKING[name], 0), (FAILING[name], None)):
        found = call([*words.split(), "--json"])
        said = capfd.readouterr()
        document = json.loads(said.out)
        assert isinstance(document, dict) and document["schema_version"] == 1
        if code == 0:
            assert found == 0 and "error" not in document, said.err
        else:
            assert document["error"]["exit_code"] == found > 0
            assert said.err.startswith("error: ") and document["error"]["message"] in said.err.replace("error: ", "")


@pytest.mark.parametrize("words", ["presets --json show quick", "presets --json copy quick x.toml"])
def test_a_group_hands_json_on(study: Path, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(words.split()) == 0
    assert json.loads(capfd.readouterr().out)["name"] == "quick"


def test_what_follows_two_dashes_is_no_option(study: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(["plan", "--", "--json"]) == 2
    assert capfd.readouterr().out == ""


# ------------------------------------------------------------------------------------------------ odd arguments

NINES = "9" * 300


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", ""], '"": no path; expected a study file (.toml) or one of balance-methods'),
        (["plan", "a\0b"], '"a\\u0000b": no path'),
        (["plan", "x" * 5000], "File name too long; expected a study file (.toml) or a preset"),
        (["train", "", "--arm", "moe"], '"": no path'),
        (["run", "quick", "--out", ""], '--out "": expected a path; the current folder is written .'),
        (["run", "quick", "--cache", ""], '--cache "": expected a path'),
        (["train", "quick", "--out", "a\0"], '--out "a\\u0000": expected a path'),
        (["train", "quick", "--data", ""], '--data "": expected a path'),
        (["status", ""], 'DIR "": expected a path'),
        (["watch", ""], 'DIR "": expected a path'),
        (["report", "x\0"], 'DIR "x\\u0000": expected a path'),
        (["power", ""], 'DIR "": expected a path'),
        (["sample", "", "x"], 'RUN "": expected a path'),
        (["export", "x", ""], 'DIR "": expected a path'),
        (["evaluate", "x", "--text", ""], '--text "": expected a path'),
        (["presets", "copy", "quick", ""], 'FILE "": expected a path'),
        (["plan", "quick", "--jobs", "9" * 5000], "expected auto or a whole number of at least 1 and below a million"),
        (["sample", "x", "y", "--temperature", "nan"], "--temperature nan: expected 0 or more"),
        (["sample", "x", "y", "--temperature", "-1"], "--temperature -1.0: expected 0 or more"),
        (["sample", "x", "y", "--tokens", NINES], "less than or equal to 1000000; see equipoise sample --help"),
        (["sample", "x", "y", "--seed", "9" * 5000], "--seed"),
        (["train", "quick", "--arm", "mo", "--seed", "0"], "--arm mo: expected one of moe, dense-active, dense-total"),
        (["train", "quick", "--arm", "moe", "--seed", NINES], "expected one of 0, 1, 2"),
        (["evaluate", "x", "--text", "x", "--kind", "tinystory"], "did you mean 'tinystories'?"),
        (["bench", "--device", "cud"], "--device cud: expected auto, cpu or cuda; did you mean 'cuda'?"),
        (["presets", "show", "quik"], "did you mean 'quick'?"),
        (["rnu"], "No such command 'rnu'. Did you mean 'run'?; see equipoise --help"),
        (["fly"], "No such command 'fly'; see equipoise --help"),
        (["run", "quick", "--job", "3"], "--jobs"),
        (["status", "\x1b[31mred"], "\\x1b[31mred: no such folder"),
        (["plan", "quick", "--set", 'corpus={kind="text", path=""}'], 'corpus.path: "" is not accepted; expected a'),
        (["plan", "quick", "--set", 'corpus={kind="tinystories", path="\\u0000"}'], 'corpus.path: "\\u0000" is not'),
        (["plan", "quick", "--set", 'corpus={kind="gutenberg", path=""}'], 'corpus.path: "" is not accepted'),
        (["plan", "quick", "--set", 'name="CON"'], 'name: "CON" is not accepted; expected a name that Windows'),
        (["plan", "quick", "--set", 'name="lpt1.old"'], "a name that Windows does not keep for a device"),
        (["plan", "quick", "--set", f'name="{"🦊" * 51}"'], "expected at most 200 bytes of UTF-8"),
    ],
)  # fmt: skip
def test_an_odd_argument_is_refused_in_lines(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(words) == 2
    told = capfd.readouterr()
    assert said in told.err and told.out == "" and "Traceback" not in told.err
    assert all(line.startswith("error: ") for line in told.err.splitlines())


@pytest.mark.parametrize("name", ["a" * 64, "語" * 64, "🦊" * 50, "console", "com10", "auxiliary", "nul-hypothesis"])
def test_names_that_only_look_odd_are_fine(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(["plan", "quick", "--set", f'name="{name}"']) == 0


def test_all_faults_of_every_table_and_override_at_once(study: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = (study / "study.toml").read_text(encoding="utf-8")
    for right, wrong in (
        ("num_documents = 120", "num_document = 120"),
        ("vocab_size = 512", "vocab_sise = 512"),
        ("balance_group = 1", "balance_group = 0"),
        ("optim = { lr = 3e-3 }", "optim = { lrr = 3e-3 }"),
        ("num_heads = 2", "num_haeds = 2"),
        ("top_k = 2", "topk = 2"),
        ('match = { to = "moe"', 'match = { to = "mo"'),
        ('kind = "lower"', 'kind = "lower"\nmargn = 0.1'),
        ('right = "dense"', 'right = "dens"'),
        ("seeds = [0, 1, 2]", 'seeds = [0, "1"]\nsedes = 1'),
    ):
        assert right in text
        text = text.replace(right, wrong)
    text += '[[claims]]\nid = "x"\nkind = "loewr"\nleft = "moe"\nright = "dense"\n'
    (study / "wrong.toml").write_text(text, encoding="utf-8")
    overrides = ["--set", 'recipe.schedul.kind="cosine"', "--set", "nonsense", "--set", "claims.7.id=1"]
    assert call(["plan", "wrong.toml", *overrides]) == 2
    said = capfd.readouterr().err
    for fault in (
        "corpus.num_document: unknown field; did you mean 'num_documents'?",
        "tokenizer.vocab_sise: unknown field; did you mean 'vocab_size'?",
        "recipe.balance_group: 0 is not accepted",
        "recipe.optim.lrr: unknown field; did you mean 'lr'?",
        "base.model.num_haeds: unknown field; did you mean 'num_heads'?",
        "arms.moe.model.ffn.topk: unknown field; did you mean 'top_k'?",
        "arms.dense.match.to: \"mo\" is not accepted; expected one of moe; did you mean 'moe'?",
        "claims.0.margn: unknown field; did you mean 'margin'?",
        'claims.1.kind: "loewr" is not accepted',
        "did you mean 'lower'?",
        'seeds.1: "1" is not accepted; expected a whole number',
        "sedes: unknown field; did you mean 'seeds'?",
        "recipe.schedul: unknown field; did you mean 'schedule'?",
        "--set nonsense: expected path.to.field=value",
        "--set claims.7.id=1: '7' is no item of a list of 2; items count from 0",
    ):
        assert fault in said, fault + "\n\n" + said


# ------------------------------------------------------------------------------------------------ tables


WIDE = (
    [("arm", False), *((f"number {index}", True) for index in range(8)), ("note", False)],
    [["dense-active", *(f"{index}23,456" for index in range(8)), "a sentence long enough to be broken somewhere"]],
)  # fmt: skip


@pytest.mark.parametrize("width", [30, 60, 80, 100, 120, 200])
def test_a_table_fits_and_loses_nothing(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    monkeypatch.setattr(console, "out", lambda: Console(width=width, highlight=False, markup=False))
    print_table("Title", *WIDE, facts=["A fact."])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines[1:]) <= width
    words = " ".join(lines).split()
    assert all(f"{index}23,456" in words for index in range(8)), "no number is broken"
    assert words.count("dense-active") == len(parts(*WIDE, width))
    assert " ".join(word for word in words if word in WIDE[1][0][-1].split()).endswith("broken somewhere")


def test_every_part_of_a_table_says_which_row_is_which() -> None:
    headings = [("budget", True), ("arm", False), ("loss", True), ("seeds", False)]
    rows = [["500k", "moe", "0.7528 ± 0.0213", "3 of 3"], ["500k", "dense", "0.7479 ± 0.0146", "3 of 3"]]
    assert parts(headings, rows, 32) == [[0, 1, 2], [0, 1, 3]], "both have the same budget"
    assert parts(headings, [rows[0], ["1M", *rows[1][1:]]], 32) == [[0, 1, 2], [0, 3]]
    assert parts(headings, rows, 24) == [[0, 1], [0, 2], [0, 3]], "no room for both"


def test_prose_keeps_its_indent_on_a_terminal_and_one_line_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "    " + "word " * 30
    prose(text, 4)
    assert capsys.readouterr().out.count("\n") == 1
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    prose(text, 4)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert len(lines) > 3 and all(line.startswith("    word") and len(line) <= 40 for line in lines)


# ------------------------------------------------------------------------------------------------ completion


def complete(*words: str, cwd: Path) -> list[str]:
    """What bash would be offered after these words."""
    environment = {
        **os.environ,
        "_EQUIPOISE_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(("equipoise", *words)),
        "COMP_CWORD": str(len(words)),
    }
    command = [sys.executable, "-c", "from equipoise.cli.main import main; main()"]
    done = subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0 and done.stderr == ""
    return done.stdout.split()


def test_the_shell_completes_commands_presets_files_and_choices(tmp_path: Path) -> None:
    (tmp_path / "quarrel.toml").touch()
    (tmp_path / "quarters").mkdir()
    (tmp_path / "quarters" / "a.toml").touch()
    assert complete("pl", cwd=tmp_path) == ["plan"]
    assert complete("run", "qua", cwd=tmp_path) == ["quarrel.toml", "quarters/"]
    assert complete("run", "quarters/", cwd=tmp_path) == ["quarters/a.toml"]
    assert complete("plan", "tinystories", cwd=tmp_path) == ["tinystories", "tinystories-cpu"]
    assert complete("presets", "show", "ladder", cwd=tmp_path) == ["ladder", "ladder-cpu"]
    assert complete("run", "quick", "--device", "c", cwd=tmp_path) == ["cpu", "cuda"]


def test_choices_begin_as_typed() -> None:
    assert one_of("cpu", "cuda", "auto")("c") == ["cpu", "cuda"] and one_of("a")("") == ["a"]


def test_completion_for_a_shell_can_be_shown() -> None:
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "equipoise", "--show-completion", "bash"],
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0 and "_EQUIPOISE_COMPLETE=complete_bash" in done.stdout


# ------------------------------------------------------------------------------------------------ presets copy


@pytest.mark.parametrize("name", ["a:b.toml", "con.toml", ".toml ", "x" * 65 + ".toml"])
def test_a_copy_whose_name_no_study_can_have_is_not_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(["presets", "copy", "quick", name]) == 2
    assert "the study would be named after it; name: " in capfd.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["mein Versuch.toml", "a'b.toml", "über.toml", "v1.2.toml", "noending"])
def test_a_copy_with_an_unusual_name_can_be_planned(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import shlex

    monkeypatch.chdir(tmp_path)
    assert call(["presets", "copy", "quick", name]) == 0
    words = shlex.split(capfd.readouterr().err.split("plan it with: ")[1])
    assert call([*words[1:], "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["name"] == Path(name).stem


# ------------------------------------------------------------------------------------------------ sample


def test_sample_says_which_weights_when_the_newest_are_damaged(study: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = "runs/tiny/moe/5120-s0"
    steps = sorted((study / run / "checkpoints").glob("step-*"))
    assert len(steps) > 1
    with (steps[-1] / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    before = sorted(path.name for path in (study / run / "checkpoints").iterdir())
    assert call(["sample", run, "Once", "--tokens", "2", "--json"]) == 0
    said = capfd.readouterr()
    found = json.loads(said.out)
    older = int(steps[-2].name.removeprefix("step-"))
    assert (found["step"], found["newest_step"], found["temperature"]) == (older, 10, 0.0)
    assert f"warning: {run}/checkpoints/step-00000010/model.safetensors: 100 bytes" in said.err
    assert f"these are the weights of step {older}" in said.err
    assert sorted(path.name for path in (study / run / "checkpoints").iterdir()) == before, "reads only"


# ------------------------------------------------------------------------------------------------ other versions


def rewrite(path: Path, change: Any) -> None:
    """Change a stored file as another version would have written it: its digest is that of its content."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    change(stored)
    path.write_text(json.dumps(stored), encoding="utf-8")


def test_what_another_version_wrote_is_not_called_altered(study: Path) -> None:
    def without_a_field(stored: dict[str, Any]) -> None:
        del stored["run"]["recipe"]["eval_split"]
        stored["digest"] = digest(stored["run"])

    config = study / "runs/tiny/moe/5120-s0/config.json"
    rewrite(config, without_a_field)
    expected = (
        "written by another version of Equipoise, whose fields were others; go on with that version, or take another "
        '--out (recipe.eval_split: absent → "validation")'
    )
    with pytest.raises(IntegrityError) as caught:
        read_config(config.parent)
    assert str(caught.value) == f"{config}: {expected}"
    assert read_run(config.parent).status == "broken" and expected in str(read_run(config.parent).fault)

    def with_a_field(stored: dict[str, Any]) -> None:
        stored["run"]["recipe"] |= {"eval_split": "validation", "gone": 1}
        stored["digest"] = digest(stored["run"])

    rewrite(config, with_a_field)
    with pytest.raises(IntegrityError, match=r"written by another version .* \(recipe\.gone: unknown field"):
        read_config(config.parent)
    rewrite(config, lambda stored: stored.update(digest="0"))
    with pytest.raises(IntegrityError, match=r"not a run configuration \(recipe\.gone: unknown field"):
        read_config(config.parent)


def test_a_lock_of_another_version_says_so(study: Path) -> None:
    from equipoise.lock import LOCKED

    def of_before(stored: dict[str, Any], change: Any) -> None:
        change(stored["study"])
        stored["digest"] = digest({name: stored[name] for name in LOCKED})

    path = study / "runs/tiny/lock.json"
    rewrite(path, lambda stored: of_before(stored, lambda spec: spec["recipe"].pop("eval_split")))
    assert read_lock(path.parent).study.recipe.eval_split == "validation", "a later field at its default"
    rewrite(path, lambda stored: of_before(stored, lambda spec: spec.update(gone=1)))
    with pytest.raises(IntegrityError, match=r"another version .* \(gone: unknown field"):
        read_lock(path.parent)
    rewrite(path, lambda stored: stored.update(digest="0"))
    with pytest.raises(IntegrityError, match=r"lock\.json: not a study lock \(gone: unknown field"):
        read_lock(path.parent)


def test_a_place_is_a_path() -> None:
    assert console.place("--out")(".") == Path()
    with pytest.raises(ConfigError, match=r'^--out "": expected a path; the current folder is written \.$'):
        console.place("--out")("")
