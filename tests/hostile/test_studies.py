"""Study files that cannot be meant: whatever they hold, they are planned or refused in lines that name the place."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.config import MAX_CHARS, Table, apply_override, read_toml
from equipoise.errors import ConfigError
from equipoise.spec.study import load_study_table, parse_study
from equipoise.study import DataFacts, plan

from ..conftest import TINY
from .conftest import HOSTILE, NASTY_NUMBERS, NASTY_TEXTS, Call, altered, told

TABLE = tomllib.loads(TINY)


def planned(table: Table) -> None:
    spec = parse_study(table)
    plan(spec, DataFacts(vocab_size=512, train_tokens=10**6, certain=True, eval_tokens=10**4))


@HOSTILE
@given(table=altered(TABLE))
def test_wrong_values_anywhere(table: Table) -> None:
    told(lambda: planned(table), ConfigError)


@HOSTILE
@given(data=st.data())
def test_bytes_put_anywhere_into_the_file(data: st.DataObject, tmp_path: Path) -> None:
    content = TINY.encode()
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, min(len(content), start + 30)))
    middle = data.draw(
        st.one_of(
            st.binary(max_size=12),
            st.sampled_from([b"[" * 5_000, b"a." * 3_000, b"{a=" * 500, b"9" * 5_000, b"0x" + b"f" * 9_000, b"1e999"]),
            st.sampled_from(
                [b"\n[arms.dense]\n", b"[[arms]]", b'"', b"'''", b"\0", b"\xef\xbb\xbf", b"\r", b" = nan\n"]
            ),
            st.sampled_from([*map(repr, NASTY_NUMBERS), *map(repr, NASTY_TEXTS)]).map(str.encode),
        )
    )
    file = tmp_path / "study.toml"
    file.write_bytes(content[:start] + middle + content[end:])
    told(lambda: planned(load_study_table(str(file))[0]), ConfigError)


paths = st.one_of(
    st.sampled_from(["seeds", "arms.moe.model.ffn", "recipe.optim.lr", "claims.0.left", "claims.0", "base", "x.y.z"]),
    st.text(st.sampled_from("seds.arm019 \n\0\udcff\u0663"), max_size=12),
    st.sampled_from(["a." * 100 + "b", "claims." + "9" * 5_000, "claims.\u0663", "arms.a.model.b"]),
)
rights = st.one_of(
    st.sampled_from([*map(str, NASTY_NUMBERS), *NASTY_TEXTS, "[" * 5_000, "9" * 5_000, "0x" + "f" * 9_000, "nan"]),
    st.sampled_from(['"a\\u0000b"', '"\udcff"', "1979-05-27", "{ sweep = [1, 2] }", "{a = {b = 1}}", "[[1], {}]"]),
    st.text(max_size=8),
)


@HOSTILE
@given(path=paths, right=rights)
def test_overrides_of_anything_by_anything(path: str, right: str) -> None:
    told(lambda: planned(apply_override(TABLE, f"{path}={right}")), ConfigError)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = " + "[" * 5_000, "not valid TOML: nested too deeply; expected at most 32 levels"),
        ("x = " + "{a = " * 1_000, "not valid TOML: nested too deeply; expected at most 32 levels"),
        ("[" + "a." * 5_000 + "b]", "not valid TOML: nested too deeply; expected at most 32 levels"),
        ("x = " + "[" * 33 + "]" * 33, "not valid TOML: nested too deeply; expected at most 32 levels"),
        ("x = " + "9" * 5_000, "not valid TOML: a number of thousands of digits; expected one of at most 64 bits"),
        ("#" * (MAX_CHARS + 1), "not valid TOML: 262,145 characters; expected at most 262,144"),
        ('"a\\nb" = = 1', "not valid TOML: Invalid value (at line 1, column 10)"),
    ],
)
def test_texts_that_no_reader_of_toml_survives(text: str, said: str) -> None:
    assert told(lambda: read_toml(text, "s.toml"), ConfigError) == f"s.toml: {said}"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("recipe.seq_len=0x" + "f" * 5_000, "recipe.seq_len: a number of 20000 bits is not accepted; expected a whole "
         "number of at most 64 bits"),
        ("arms.moe.lr={ sweep = [1, 0x" + "f" * 300 + "] }", None),
        ("seeds=[18446744073709551616]", "seeds.0: 18446744073709551616 is not accepted; expected a whole number of at "
         "most 64 bits"),
        ('name="\udcff"', 'name: "\\udcff" is not accepted; expected Unicode text (no lone surrogates)'),
        ("alpha=2", "alpha: 2.0 is not accepted; expected a number between 0 and 1"),
        ("base.model.num_layers=1025", "base.model.num_layers: 1025 is not accepted; expected at most 1,024"),
        ("base.model.num_heads=8192", None),
        ("base.model.d_model=262144", "base.model.d_model: 262144 is not accepted; expected at most 131,072"),
        ("arms.moe.model.ffn.d_expert=2097152", "arms.moe.model.ffn.d_expert: 2097152 is not accepted; expected at "
         "most 1,048,576"),
        ("arms.moe.model.ffn.num_experts=5000", "arms.moe.model.ffn.num_experts: 5000 is not accepted; expected at "
         "most 4,096"),
        ("arms.moe.model.ffn.num_shared_experts=5000", "arms.moe.model.ffn.num_shared_experts: 5000 is not accepted; "
         "expected at most 4,096"),
        ("arms.moe.model.ffn.top_k=4", "arms.moe.model.ffn.top_k: 4 is not accepted; expected 1 to num_experts = 3"),
        ("base.model.num_kv_heads=3", "base.model.num_kv_heads: 3 is not accepted; expected a divisor of "
         "num_heads = 2"),
        ("tokenizer.vocab_size=2000000", "tokenizer.vocab_size: 2000000 is not accepted; expected at most 1,048,576"),
        ("recipe.seq_len=2097152", None),
        ("recipe.num_evals=20000", "recipe.num_evals: 20000 is not accepted; expected at most 10,000"),
        ("recipe.batch_tokens=536870912", None),
        ("recipe.curve_tokens=100000000000000000", None),
        ("recipe.samples.num_tokens=200000", "recipe.samples.num_tokens: 200000 is not accepted; expected at most "
         "100,000"),
        ("corpus.num_documents=200000000", "corpus.num_documents: 200000000 is not accepted; expected at most "
         "100,000,000"),
        ("budgets=[600000000000]", "budgets: 600000000000 is not accepted; expected at most 512,000,000,000 tokens "
         "(1,000,000,000 updates)"),
        (f"budgets={list(range(256, 556))}", "budgets: 300 of them; expected at most 256"),
        (f"arms.moe.lr={{ sweep = {[i / 1000 for i in range(1, 400)]} }}", "arms: 400 of them; expected at most 256"),
        ("arms.a\nb.model={}", 'arms: "a\\nb" is not accepted; expected 1 to 64 characters that can name a folder '
         '(no / \\ : * ? " < > |)'),
        ("arms.dense.model.ffn={ kind = 'dense', d_ff = { ratio = 2000, multiple_of = 8 } }", None),
        ("claims.99999999999=1", "--set claims.99999999999=1: '99999999999' is no item of a list of 1; items count "
         "from 0"),
        ("a." * 40 + "b=1", None),
    ],
)  # fmt: skip
def test_sizes_are_bounded_and_told_in_one_line(override: str, said: str | None) -> None:
    message = told(lambda: planned(apply_override(TABLE, override)), ConfigError)
    assert message is not None and (said is None or message == said)


def test_runs_are_counted_before_they_are_made() -> None:
    table = {**TABLE, "seeds": list(range(60_000))}
    message = told(lambda: planned(table), ConfigError)
    assert message == "study: 120,000 runs (arms x seeds x budgets); expected at most 100,000"


def test_a_solved_width_beyond_what_a_model_may_have_is_told() -> None:
    table = apply_override(TABLE, "base.model.d_model=131072")
    table = apply_override(
        table, "arms.moe.model.ffn={ kind = 'moe', num_experts = 4096, top_k = 2, d_expert = 1048576 }"
    )
    table = apply_override(table, "arms.dense.match.on='total_params'")
    message = told(lambda: planned(table), ConfigError)
    assert message is not None and message.startswith("arms.dense.match: total_params = ")
    assert "asks for widths that no model may have: ffn.d_ff: " in message
    rule = apply_override(TABLE, "arms.moe.model.ffn.d_expert={ ratio = 1024, multiple_of = 8 }")
    rule = apply_override(rule, "base.model.d_model=2048")
    message = told(lambda: planned(rule), ConfigError)
    assert message == "arms.moe.model.ffn.d_expert: 2097152 is not accepted; expected at most 1,048,576"


def test_many_faults_are_counted_beyond_a_hundred(tmp_path: Path, call: Call) -> None:
    file = tmp_path / "study.toml"
    file.write_text("".join(f"field{number} = 1\n" for number in range(150)) + TINY, encoding="utf-8")
    code, _, err = call("plan", file)
    assert code == 2 and len(err.splitlines()) == 101 and err.splitlines()[-1] == "error: and 50 more"


def test_files_that_are_no_study(tmp_path: Path, call: Call) -> None:
    fifo = tmp_path / "pipe.toml"
    os.mkfifo(fifo)
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (4 * MAX_CHARS + 1))
    loop = tmp_path / "loop.toml"
    loop.symlink_to(loop)
    empty = tmp_path / "empty.toml"
    empty.touch()
    expected = "expected a study file (.toml) or a preset"
    for path, said in (
        (fifo, f"{fifo}: Is no regular file; {expected}"),
        ("/dev/zero", f"/dev/zero: Is no regular file; {expected}"),
        (large, f"{large}: Larger than 1,048,576 bytes; {expected}"),
        (loop, f"{loop}: Too many levels of symbolic links; {expected}"),
        (tmp_path, f"{tmp_path}: Is a directory; {expected}"),
        ("\ud800.toml", f"\\ud800.toml: no path ('utf-8' codec cannot write it); {expected}"),
        ("x" * 300, f"{'x' * 300}: File name too long; {expected}"),
    ):
        code, out, err = call("plan", path)
        assert (code, out, err) == (2, "", f"error: {said}\n")
    code, out, err = call("plan", empty)
    assert code == 2 and "error: arms: missing" in err and all(line.startswith("error: ") for line in err.splitlines())


def test_a_message_never_writes_to_the_terminal_what_a_file_says(tmp_path: Path, call: Call) -> None:
    file = tmp_path / "study.toml"
    file.write_text(TINY + '"\\u001b[31m\\u2028key" = 1\n', encoding="utf-8")
    code, _, err = call("plan", file)
    assert code == 2 and "\x1b" not in err and err.count("\n") == 1 and "\\x1b[31m\\u2028key: unknown field" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "quick", "--set", "recipe.seq_len=" + "[" * 5_000], "the right side is a TOML value"),
        (["plan", b"caf\xe9.toml"], "caf\\udce9.toml: no such study file or preset"),
        (["run", "quick", "--set", b'name="caf\xe9"'], 'name: "caf\\udce9" is not accepted; expected Unicode text'),
    ],
)
def test_a_real_process_ends_with_one_line_and_code_2(arguments: list[str | bytes], said: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "equipoise", *arguments]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, timeout=120, check=False)
    err = done.stderr.decode()
    assert done.returncode == 2 and done.stdout == b"" and not list(tmp_path.iterdir())
    assert err.startswith("error: ") and err.count("\n") == 1 and said in err
