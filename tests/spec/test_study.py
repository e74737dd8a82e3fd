"""From a study file to a study: arms over base, open widths, every fault in one line, and runs that read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from equipoise.config import apply_override, digest, dump, load, read_toml
from equipoise.errors import ConfigError
from equipoise.routing import diagnose
from equipoise.spec.claims import (
    ROUTING_METRICS,
    EquivalentClaim,
    FasterClaim,
    LowerClaim,
    RoutingClaim,
    TrendClaim,
    claim_arms,
    left_arms,
)
from equipoise.spec.model import DenseFFN, ModelConfig, MoEFFN, NoBalance, WidthRule
from equipoise.spec.recipe import WSD, Optim, Recipe, Samples
from equipoise.spec.run import RunConfig, num_steps
from equipoise.spec.study import Match, load_study_table, parse_study, preset_names

STUDY = """
name = "x"
seeds = [0, 1]
budgets = [100_000, 200_000]
[corpus]
kind = "grammar"
[tokenizer]
kind = "bpe"
vocab_size = 512
[recipe]
seq_len = 128
batch_tokens = 1024
optim = { lr = 1e-3 }
[base.model]
num_layers = 2
num_heads = 2
d_model = 64
[arms.moe.model]
ffn = { kind = "moe", num_experts = 4, top_k = 2, d_expert = 64 }
[arms.dense]
match = { to = "moe", on = "active_params", adjust = "ffn.d_ff" }
model.ffn = { kind = "dense" }
[[claims]]
id = "c"
kind = "lower"
left = "moe"
right = "dense"
"""


def table(*overrides: str) -> dict[str, Any]:
    whole = read_toml(STUDY, "study.toml")
    for override in overrides:
        whole = apply_override(whole, override)
    return whole


def faults(*overrides: str, without: str = "") -> list[str]:
    whole = table(*overrides)
    *path, last = without.split(".")
    holder = whole
    for key in path:
        holder = holder[key]
    holder.pop(last, None)
    with pytest.raises(ConfigError) as caught:
        parse_study(whole)
    return str(caught.value).splitlines()


# ------------------------------------------------------------------------------------------------ study files


def test_reads_a_preset_by_name_and_a_file_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, text = load_study_table("quick")
    assert whole["name"] == "quick"
    assert text.startswith("# quick: ")
    monkeypatch.chdir(tmp_path)
    Path("quick").write_bytes(b'\xef\xbb\xbfname = "mine"\r\n')
    assert load_study_table("quick")[0]["name"] == "quick"
    assert load_study_table("./quick")[0] == {"name": "mine"}


def test_an_unknown_study_lists_the_presets() -> None:
    with pytest.raises(ConfigError) as caught:
        load_study_table("tinystorys")
    assert str(caught.value) == (
        f"tinystorys: no such study file or preset; presets: {', '.join(preset_names())}; did you mean 'tinystories'?"
    )
    assert len(preset_names()) > 2 and "quick" in str(caught.value)


def test_a_study_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r": Is a directory; expected a study file \(\.toml\) or a preset$"):
        load_study_table(str(tmp_path))
    file = tmp_path / "study.toml"
    file.write_bytes("name = 'größe'".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"study\.toml: not UTF-8 at byte 10; expected a study file in UTF-8$"):
        load_study_table(str(file))
    file.write_text("name = 'x", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"study\.toml: not valid TOML: "):
        load_study_table(str(file))


# ------------------------------------------------------------------------------------------------ reading


def test_arms_lie_over_the_base() -> None:
    study = parse_study(
        table(
            "base.model.num_kv_heads=1",
            "arms.wide.model={d_model=128, num_kv_heads=2, ffn={kind='dense', d_ff=256}}",
            "base.model.ffn={kind='moe', num_experts=8, top_k=2, d_expert=8, z_coef=0.5}",
            "arms.finer.model.ffn.num_experts=16",
        )
    )
    assert list(study.arms) == ["moe", "dense", "wide", "finer"]
    assert study.arms["moe"].model.ffn == MoEFFN(num_experts=4, top_k=2, d_expert=64, z_coef=0.5)
    assert study.arms["dense"].model.ffn == DenseFFN()
    wide = study.arms["wide"].model
    assert (wide.num_layers, wide.d_model, wide.num_kv_heads, wide.ffn) == (2, 128, 2, DenseFFN(d_ff=256))
    assert study.arms["finer"].model.ffn == MoEFFN(num_experts=16, top_k=2, d_expert=8, z_coef=0.5)
    assert study.arms["moe"].model.num_kv_heads == 1
    assert (study.alpha, study.question, study.claims[0].budget) == (0.05, "", "largest")


@pytest.mark.parametrize("adjust", ["d_model", "ffn.d_ff"])
def test_the_bases_value_of_an_adjusted_width_is_ignored(adjust: str) -> None:
    study = parse_study(
        table(
            "base.model.ffn={kind='dense', d_ff=256}",
            f"arms.dense={{match={{to='moe', on='total_params', adjust='{adjust}'}}}}",
        )
    )
    dense = study.arms["dense"].model
    assert (dense.d_model, dense.ffn) == ((0, DenseFFN(d_ff=256)) if adjust == "d_model" else (64, DenseFFN()))
    assert study.arms["dense"].match == Match(to="moe", on="total_params", adjust=adjust, rtol=0.01)  # type: ignore[arg-type]


def test_a_rule_may_stand_beside_an_adjusted_d_model() -> None:
    study = parse_study(
        table("arms.dense.match.adjust='d_model'", "arms.dense.model.ffn.d_ff={ratio=4, multiple_of=128}")
    )
    assert study.arms["dense"].model.ffn == DenseFFN(d_ff=WidthRule(ratio=4, multiple_of=128))


def test_claims_of_both_kinds() -> None:
    study = parse_study(
        table(
            "claims=[{id='a', kind='lower', left=['moe'], right='dense', margin=0.01, equivalence_margin=0.02, "
            "metric='val_bpb', budget=100_000}, {id='b', kind='equivalent', left='moe', right='dense', "
            "equivalence_margin=0.02, allow_collapsed=true}]"
        )
    )
    lower, equivalent = study.claims
    assert isinstance(lower, LowerClaim)
    assert isinstance(equivalent, EquivalentClaim)
    assert (left_arms(lower), left_arms(equivalent)) == (("moe",), ("moe",))
    assert (lower.metric, lower.budget, lower.margin, lower.equivalence_margin) == ("val_bpb", 100_000, 0.01, 0.02)
    assert (equivalent.metric, equivalent.allow_collapsed) == ("val_loss", True)


NEW = {
    "trend": "id='t', kind='trend', left='moe', right='dense', direction='grows'",
    "faster": "id='f', kind='faster', left='moe', right='dense'",
    "routing": "id='r', kind='routing', arm='moe', metric='topk_share', direction='above', threshold=0.9",
    "log_z": "id='z', kind='lower', left='moe', right='other', metric='log_z'",
    "hashed": "id='z', kind='lower', left='moe', right='hashed', metric='log_z'",
}
HASHED = "arms.hashed.model.ffn={kind='moe', num_experts=4, top_k=2, d_expert=64, router='hash'}"
OTHER = "arms.other.model.ffn={kind='moe', num_experts=4, top_k=2, d_expert=64}"
THREE = "budgets=[100_000, 200_000, 400_000]"


def test_claims_over_budgets_and_of_routing() -> None:
    listed = ", ".join(f"{{{claim}}}" for name, claim in NEW.items() if name != "hashed")
    study = parse_study(table(OTHER, THREE, f"claims=[{listed}]"))
    trend, faster, routing, log_z = study.claims
    assert isinstance(trend, TrendClaim) and (trend.direction, trend.metric) == ("grows", "val_loss")
    assert isinstance(faster, FasterClaim) and isinstance(log_z, LowerClaim)
    assert isinstance(routing, RoutingClaim) and (routing.layers, routing.at_frac) == ("mean", 1.0)
    assert [claim_arms(claim) for claim in study.claims] == [("moe", "dense")] * 2 + [("moe",), ("moe", "other")]
    assert load(type(study), json.loads(json.dumps(dump(study)))) == study


def test_the_routing_metrics_are_numbers_of_a_layer() -> None:
    layer = diagnose(np.array([3, 1, 2]), 0.5, 2.0, 1)
    assert {name for name, value in layer.items() if type(value) is float} == set(ROUTING_METRICS)


@pytest.mark.parametrize(
    ("kind", "changed", "said"),
    [
        ("trend", {"budgets=[5_000]"}, "kind: 'trend' is not accepted over 1 budget(s); expected 2 or more"),
        ("faster", set(), "kind: 'faster' is not accepted over 2 budget(s); expected 1, or 3 or more"),
        ("faster", {THREE, "claims.0.metric='val_bpb'"}, "metric: \"val_bpb\" is not accepted; expected 'val_loss'"),
        (
            "faster",
            {THREE, "recipe.schedule={kind='wsd', warmup_tokens=10_000, decay_frac=0.0}"},
            "kind: 'faster' is not accepted over several budgets whose rate never falls; "
            "expected recipe.schedule with final_frac below 1 and, of wsd, decay_frac above 0",
        ),
        ("trend", {"claims.0.right='moe'"}, 'right: "moe" is not accepted; expected an arm that is not on the left'),
        ("trend", {"claims.0.direction='up'"}, "direction: \"up\" is not accepted; expected one of 'grows', 'narrows'"),
        (
            "trend",
            {"claims.0.left='mo'"},
            "left: \"mo\" is not accepted; expected one of moe, dense; did you mean 'moe'?",
        ),
        (
            "routing",
            {"claims.0.arm='mo'"},
            "arm: \"mo\" is not accepted; expected one of moe, dense; did you mean 'moe'?",
        ),
        (
            "routing",
            {"claims.0.arm='dense'"},
            "arm: \"dense\" is not accepted; expected a routed arm, for metric = 'topk_share'",
        ),
        ("routing", {"claims.0.at_frac=0"}, "at_frac: 0.0 is not accepted; expected above 0 to 1"),
        ("routing", {"claims.0.at_frac=1.5"}, "at_frac: 1.5 is not accepted; expected above 0 to 1"),
        ("routing", {"claims.0.budget=3"}, "budget: 3 is not accepted; expected 'largest' or one of 100000, 200000"),
        (
            "log_z",
            {"claims.0.right='dense'"},
            "right: \"dense\" is not accepted; expected a routed arm, for metric = 'log_z'",
        ),
        (
            "hashed",
            set(),
            "right: \"hashed\" is not accepted; expected an arm whose router has weights, for metric = 'log_z'",
        ),
    ],
)
def test_faults_of_claims_over_budgets_and_of_routing(kind: str, changed: set[str], said: str) -> None:
    others = {"log_z": [OTHER], "hashed": [HASHED]}.get(kind, [])
    assert faults(f"claims=[{{{NEW[kind]}}}]", *others, *sorted(changed)) == [f"claims.0.{said}"]


def test_a_threshold_is_finite() -> None:
    with pytest.raises(ValueError, match=r"^threshold: Infinity is not accepted; expected a finite number$"):
        RoutingClaim(id="r", arm="moe", metric="log_z", direction="above", threshold=float("inf"))


def test_a_study_reads_back() -> None:
    study = parse_study(table())
    assert load(type(study), json.loads(json.dumps(dump(study)))) == study


def test_parsing_changes_nothing_it_was_given() -> None:
    whole = table("base.model.ffn={kind='dense', d_ff=8}")
    before = json.dumps(whole)
    parse_study(whole)
    assert json.dumps(whole) == before


# ------------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        # where a fault is written, however many arms inherit it
        ("base.model.num_layers=0", "base.model.num_layers: 0 is not accepted; expected at least 1"),
        ("base.model.num_layrs=3", "base.model.num_layrs: unknown field; did you mean 'num_layers'?"),
        ("base.model.num_heads=3", "base.model.d_model: 64 is not accepted; expected a multiple of 2 x num_heads = 6"),
        ("base.model=3", "base.model: 3 is not accepted; expected a table"),
        ("base=3", "base: 3 is not accepted; expected a table"),
        ("base.corpus={}", "base.corpus: unknown field; known fields: model"),
        (
            "base.model.vocab_size=512",
            "base.model.vocab_size: not set here; it is what the tokenizer has, tokenizer.vocab_size",
        ),
        (
            "arms.moe.model.vocab_size=512",
            "arms.moe.model.vocab_size: not set here; it is what the tokenizer has, tokenizer.vocab_size",
        ),
        ("arms=3", "arms: 3 is not accepted; expected a table"),
        ("arms={}", "arms: missing; expected at least one table [arms.NAME.model]"),
        ("arms.moe=3", "arms.moe: 3 is not accepted; expected a table"),
        ("arms.moe.model=3", "arms.moe.model: 3 is not accepted; expected a table with kind"),
        ("arms.moe.modell={}", "arms.moe.modell: unknown field; did you mean 'model'?"),
        # names
        (
            'name="a/b"',
            'name: "a/b" is not accepted; expected 1 to 64 characters that can name a folder (no / \\ : * ? " < > |)',
        ),
        ('name=""', 'name: "" is not accepted; expected 1 to 64 characters that can name a folder'),
        ('name=".."', 'name: ".." is not accepted; expected 1 to 64 characters that can name a folder'),
        ('name="a "', 'name: "a " is not accepted; expected 1 to 64 characters that can name a folder'),
        (f'name="{"a" * 65}"', f'name: "{"a" * 65}" is not accepted; expected 1 to 64 characters'),
        (
            "arms.Data.model.ffn={kind='dense', d_ff=8}",
            'arms: "Data" is not accepted; expected a name the study directory does not use itself',
        ),
        # seeds, budgets, alpha
        ("seeds=[]", "seeds: [] is not accepted; expected a list of different whole numbers, 0 or more"),
        ("seeds=[1, 1]", "seeds: [1, 1] is not accepted; expected a list of different whole numbers, 0 or more"),
        ("seeds=[-1]", "seeds: [-1] is not accepted; expected a list of different whole numbers, 0 or more"),
        ("seeds=3", "seeds: 3 is not accepted; expected a list of whole numbers"),
        ("budgets=[0]", "budgets: [0] is not accepted; expected a list of different whole numbers, 1 or more"),
        (
            "budgets=[511, 512]",
            "budgets: 511 is not accepted; expected at least half a step of recipe.batch_tokens = 1024",
        ),
        ("alpha=1", "alpha: 1.0 is not accepted; expected a number between 0 and 1"),
        # matching
        (
            "arms.dense.match.to='mo'",
            "arms.dense.match.to: \"mo\" is not accepted; expected one of moe; did you mean 'moe'?",
        ),
        ("arms.dense.match.to='dense'", 'arms.dense.match.to: "dense" is not accepted; expected one of moe'),
        (
            "arms.x={match={to='dense', on='total_params', adjust='ffn.d_ff'}, model={ffn={kind='dense'}}}",
            'arms.x.match.to: "dense" is not accepted; expected an arm that is not matched itself',
        ),
        ("arms.dense.match.rtol=1", "arms.dense.match.rtol: 1.0 is not accepted; expected 0 to below 1"),
        (
            "arms.dense.match.on='params'",
            'arms.dense.match.on: "params" is not accepted; expected one of '
            "'active_params', 'total_params', 'flops_per_token'",
        ),
        (
            "arms.dense.match.adjust='ffn.d_expert'",
            'arms.dense.match.adjust: "ffn.d_expert" is not accepted; expected d_model or ffn.d_ff, '
            "the widths of ffn.kind = 'dense'",
        ),
        (
            "arms.dense.model.ffn.d_ff=128",
            "arms.dense.model.ffn.d_ff: set beside match.adjust = 'ffn.d_ff'; it is solved, leave it out",
        ),
        (
            "arms.moe.model.ffn.d_expert=0",
            "arms.moe.model.ffn.d_expert: missing; expected a whole number or a table, "
            "or match.adjust = 'ffn.d_expert'",
        ),
        # claims
        (
            "claims.0.left='mo'",
            "claims.0.left: \"mo\" is not accepted; expected one of moe, dense; did you mean 'moe'?",
        ),
        ("claims.0.left=['moe', 'x']", 'claims.0.left: "x" is not accepted; expected one of moe, dense'),
        (
            "claims.0.left=['moe', 'moe']",
            'claims.0.left: ["moe", "moe"] is not accepted; expected one arm or a list of different arms',
        ),
        ("claims.0.left=[]", "claims.0.left: [] is not accepted; expected one arm or a list of different arms"),
        ("claims.0.right='d'", 'claims.0.right: "d" is not accepted; expected one of moe, dense'),
        ("claims.0.right='moe'", 'claims.0.right: "moe" is not accepted; expected an arm that is not on the left'),
        ("claims.0.id=' '", 'claims.0.id: " " is not accepted; expected a name of its own'),
        ("claims.0.margin=-1", "claims.0.margin: -1.0 is not accepted; expected 0 or more"),
        (
            "claims.0.equivalence_margin=0",
            "claims.0.equivalence_margin: 0.0 is not accepted; expected above margin = 0.0",
        ),
        ("claims.0.budget=3", "claims.0.budget: 3 is not accepted; expected 'largest' or one of 100000, 200000"),
        (
            "claims.0.budget='larg'",
            "claims.0.budget: \"larg\" is not accepted; expected a whole number or 'largest'; did you mean 'largest'?",
        ),
        ("claims=3", "claims: 3 is not accepted; expected a list of tables"),
        (
            "claims=[3]",
            "claims.0: 3 is not accepted; expected a table with kind = one of 'lower', 'equivalent', 'larger', "
            "'trend', 'faster', 'routing'",
        ),
    ],
)
def test_a_fault_takes_one_line(override: str, expected: str) -> None:
    (line,) = faults(override)
    assert line.startswith(expected.removesuffix(" with kind"))


@pytest.mark.parametrize(
    ("without", "expected"),
    [
        ("recipe", ["recipe: missing; expected a table"]),
        ("corpus.kind", ["corpus.kind: missing; expected one of 'grammar', 'text', 'tinystories', 'gutenberg'"]),
        ("base.model.num_layers", ["base.model.num_layers: missing; expected a whole number"]),
        ("base.model.d_model", ["base.model.d_model: missing; expected a whole number, or match.adjust = 'd_model'"]),
        ("arms.dense.match.to", ["arms.dense.match.to: missing; expected a text"]),
        (
            "arms.dense.match",
            ["arms.dense.model.ffn.d_ff: missing; expected a whole number or a table, or match.adjust = 'ffn.d_ff'"],
        ),
        ("arms.moe.model.ffn", ["arms.moe.model.ffn: missing; expected a table with kind = one of 'dense', 'moe'"]),
    ],
)
def test_what_is_missing_is_named(without: str, expected: list[str]) -> None:
    assert faults(without=without) == expected


def test_claims_have_names_of_their_own() -> None:
    claim = "{id='c', kind='equivalent', left='moe', right='dense', equivalence_margin=0}"
    assert faults(f"claims=[{claim}]") == ["claims.0.equivalence_margin: 0.0 is not accepted; expected above 0"]
    claims = ", ".join(claim.replace("margin=0", "margin=1") for _ in range(2))
    assert faults(f"claims=[{claims}]") == [
        f'claims.{index}.id: "c" is not accepted; expected a name of its own' for index in range(2)
    ]


def test_an_arm_alone_cannot_be_matched() -> None:
    arms = "arms={x={match={to='y', on='total_params', adjust='ffn.d_ff'}, model={ffn={kind='dense'}}}}"
    assert faults(arms, "claims=[]") == ['arms.x.match.to: "y" is not accepted; expected a second arm']


def test_arms_that_would_share_a_folder_on_some_systems() -> None:
    assert faults("arms.MoE={model={ffn={kind='dense', d_ff=8}}}") == [
        f'arms: "{name}" is not accepted; expected names that differ by more than case, for they become folders'
        for name in ("moe", "MoE")
    ]


def test_faults_of_fields_and_between_fields_come_together() -> None:
    found = faults(
        'recipe.seq_len="a"',
        "recipe.optim.lr=-1",
        "seeds=[]",
        "base.model.num_layers=0",
        "claims.0.left='mo'",
        "arms.moe.model.ffn.d_exprt=3",
        "sedes=[0]",
    )
    assert sorted(found) == sorted(
        [
            'recipe.seq_len: "a" is not accepted; expected a whole number',
            "recipe.optim.lr: -1.0 is not accepted; expected above 0",
            "seeds: [] is not accepted; expected a list of different whole numbers, 0 or more",
            "base.model.num_layers: 0 is not accepted; expected at least 1",
            "claims.0.left: \"mo\" is not accepted; expected one of moe, dense; did you mean 'moe'?",
            "arms.moe.model.ffn.d_exprt: unknown field; did you mean 'd_expert'?",
            "sedes: unknown field; did you mean 'seeds'?",
        ]
    )


# ------------------------------------------------------------------------------------------------ runs

MODEL = ModelConfig(num_layers=1, num_heads=2, d_model=8, vocab_size=257, ffn=DenseFFN(d_ff=16))
RECIPE = Recipe(seq_len=16, batch_tokens=128, optim=Optim(lr=1e-3))
RUNS = [
    RunConfig(arm="dense", seed=0, budget=1000, model=MODEL, recipe=RECIPE, data="ab"),
    RunConfig(
        arm="größe-2",
        seed=7,
        budget=40_500_000,
        data="cd",
        model=ModelConfig(
            num_layers=3,
            num_heads=6,
            num_kv_heads=2,
            d_model=48,
            vocab_size=8348,
            tie_embeddings=False,
            rope_theta=500_000,
            norm_eps=1e-6,
            ffn=MoEFFN(num_experts=8, top_k=1, d_expert=24, renormalize=False, balance=NoBalance(), z_coef=1e-3),
        ),
        recipe=Recipe(
            seq_len=64,
            batch_tokens=2048,
            balance_group=4,
            micro_sequences=16,
            optim=Optim(lr=1, betas=(0, 0.99), grad_clip=0),
            schedule=WSD(warmup_tokens=1),
            dtype="bfloat16",
            eval_split="selection",
            samples=Samples(prompts=(), num_tokens=1),
        ),
    ),
]
DIGEST = "95a3ec67e5dfd6cee8cbcf8cd89bdfb23a93cf61f42ea74a2f6a51238c4d403e"


@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run.arm))
def test_a_run_reads_back(run: RunConfig) -> None:
    again = load(RunConfig, json.loads(json.dumps(dump(run), ensure_ascii=False)))
    assert again == run
    assert dump(again) == dump(run)
    assert digest(again) == digest(run)


def test_the_digest_of_a_run_never_changes() -> None:
    """Every run directory holds its digest; whatever changes this one makes all finished runs strangers."""
    assert digest(RUNS[0]) == DIGEST


def test_folders_and_steps() -> None:
    assert RUNS[1].folder == "größe-2/40500000-s7"
    assert RUNS[0].num_steps == 8  # 1000 / 128 = 7.8


@pytest.mark.parametrize(("budget", "expected"), [(1, 1), (128, 1), (191, 1), (192, 2), (320, 3), (12_800, 100)])
def test_steps_are_the_nearest_whole_number(budget: int, expected: int) -> None:
    assert num_steps(budget, RECIPE) == expected
