"""Made-up results in the form of `results.collect`: three arms × three seeds × two budgets, one lost, one collapsed."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest

BUDGETS = [40_500_000, 426_300_000]
SEEDS = [0, 1, 2]
SAMPLING = {"ci_low": -0.0333, "ci_high": 0.0444, "confidence": 0.95, "num_documents": 21_990, "resamples": 2000}
KINDS = {"direction": None, "threshold": None, "layers": None, "at_frac": None}
"""What claims of the kinds `lower` and `equivalent` do not say."""
ARMS = ["moe", "dense-active", "dense-total"]
LEVELS = {"moe": 1.58, "dense-active": 1.655, "dense-total": 1.561}
HOSTILE = '<script>alert(1)</script>"><img src=x onerror=alert(2)>{{7*7}}$x_$_base\u2028\u202e\u200f\x00|`a`\n{% raw %}'


def _layers(share: float, step_frac: float) -> list[dict[str, Any]]:
    layers = []
    for layer in range(4):
        top = 0.25 + (share - 0.25) * step_frac * (1 - 0.1 * layer)
        usage = [top, 0.3 - 0.02 * layer, 0.0, 0.0]
        usage[2] = (1 - sum(usage)) * 0.6
        usage[3] = 1 - sum(usage)
        layers.append(
            {
                "usage": usage,
                "busiest_frac": max(usage),
                "usage_variance": 0.002,
                "load_cv": 0.1,
                "max_vio": 4 * max(usage) - 1,
                "usage_entropy": -sum(f * math.log(f) for f in usage if f > 0) / math.log(4),
                "router_entropy": 0.98 - 0.3 * step_frac - 0.04 * layer,
                "log_z": 1.4 + 0.8 * step_frac + 0.1 * layer,
                "topk_share": usage[0] + usage[1],
                "dead": [3] if usage[3] < 0.05 else [],
                "collapsed": usage[0] + usage[1] >= 0.9,
            }
        )
    return layers


def make_results(num_points: int = 24) -> dict[str, Any]:
    """The whole dictionary; of the small budget moe/seed 2 collapsed and dense-active/seed 1 diverged."""
    noise = random.Random(7)
    runs, curves, routing, samples, values = [], [], [], [], {}
    for budget in BUDGETS:
        for arm in ARMS:
            for seed in SEEDS:
                diverged = (arm, seed, budget) == ("dense-active", 1, BUDGETS[0])
                collapsed = (arm, seed, budget) == ("moe", 2, BUDGETS[0])
                level = LEVELS[arm] + (0.35 if budget == BUDGETS[0] else 0) + noise.gauss(0, 0.002)
                final = None if diverged else level
                values[arm, seed, budget] = final
                runs.append(
                    {
                        "arm": arm,
                        "seed": seed,
                        "budget": budget,
                        "status": "diverged" if diverged else "complete",
                        "val_loss": final,
                        "best_val_loss": None if diverged else level - 0.0004,
                        "val_bpb": None if diverged else level / 2.77,
                        "best_step": None if diverged else budget // 65_536,
                        "collapsed": collapsed,
                        "best_collapsed": collapsed,
                        "post_hoc": False,
                        "environments": [0],
                        "num_spikes": 1 if diverged else 0,
                        "tokens": budget,
                        "train_s": budget / 41_000,
                        "tokens_per_s": 41_000.0,
                        "peak_memory_bytes": 3_221_225_472,
                        "train_flops": budget * 91_000_000,
                        "steps": budget // 65_536,
                        "message": "loss is nan at step 371" if diverged else None,
                    }
                )
                points = []
                for index in range(num_points + 1):
                    frac = index / num_points
                    if diverged and frac > 0.6:
                        break
                    loss = level + (9.03 - level) * math.exp(-14 * frac**0.6) + noise.gauss(0, 0.004) * (frac < 1)
                    points.append(
                        {
                            "step": int(frac * budget / 65_536),
                            "tokens": int(frac * budget),
                            "flops": int(frac * budget) * 91_000_000,
                            "seconds": frac * budget / 41_000 * (1 + 0.1 * seed),
                            "loss": None if diverged and frac >= 0.6 else loss,
                        }
                    )
                curves.append(
                    {"arm": arm, "seed": seed, "budget": budget, "status": runs[-1]["status"], "points": points}
                )
                if arm == "moe":
                    share = 0.9 if collapsed else 0.31 + 0.02 * seed
                    routing.append(
                        {
                            "arm": arm,
                            "seed": seed,
                            "budget": budget,
                            "top_k": 2,
                            "num_experts": 4,
                            "collapsed": collapsed,
                            "points": [
                                {
                                    "step": p["step"],
                                    "tokens": p["tokens"],
                                    "layers": _layers(min(share, 0.5), p["tokens"] / budget),
                                }
                                for p in points
                            ],
                            "final": _layers(min(share, 0.65), 1.0),
                        }
                    )
                for prompt in ("Once upon a time, there was a little dragon", "Tom and Lily went to the park because"):
                    for step in (300, budget // 65_536):
                        samples.append(
                            {
                                "arm": arm,
                                "seed": seed,
                                "budget": budget,
                                "step": step,
                                "tokens": step * 65_536,
                                "prompt": prompt,
                                "text": f"named Pip ({arm}, {seed}, step {step}). Pip liked to sit on the warm rocks "
                                'by the river.\n\n"Where do the boats go?" he asked. "To the sea," she said.',
                            }
                        )
    table = [
        _row(values, arm, budget, metric)
        for budget in BUDGETS
        for arm in ARMS
        for metric in ("val_loss", "best_val_loss", "val_bpb")
    ]
    pairs = [("moe", "dense-active"), ("moe", "dense-total")]
    gaps = [
        {
            **_contrast(values, left, right, budget, scale),
            "metric": metric,
            "post_hoc": False,
            "validation_sampling": None if metric == "val_bpb" else SAMPLING,
        }
        for left, right in pairs
        for budget in BUDGETS
        for metric, scale in (("best_val_loss", 1.0), ("val_bpb", 1 / 2.77))
    ]
    widths = {"num_layers": 4, "num_heads": 4, "num_kv_heads": 4}
    return {
        "schema_version": 1,
        "name": "tinystories",
        "question": "At equal active, or equal total, parameters: does a routed layer lower validation loss?",
        "alpha": 0.05,
        "split": "validation",
        "arms": [
            {
                "name": "moe",
                "kind": "moe",
                "ffn": "4 experts, top-2",
                "widths": {**widths, "d_model": 512, "d_expert": 512, "num_experts": 4, "top_k": 2},
                "params": {
                    "total": 21_064_192,
                    "active": 14_772_736,
                    "total_nonembedding": 16_790_016,
                    "active_nonembedding": 10_498_560,
                },
                "by_component": {
                    "embedding": 4_274_176,
                    "attention": 4_194_304,
                    "router": 8_192,
                    "experts": 12_582_912,
                    "norms": 4_608,
                },
                "flops_per_token": 101_203_968,
                "match": None,
                "lr": 1e-3,
                "own_budgets": [],
                "shared_init": None,
                "tokens_per_expert": {"40500000": 20_250_624.0, "426300000": 213_155_840.0},
            },
            {
                "name": "dense-active",
                "kind": "dense",
                "ffn": "dense",
                "widths": {**widths, "d_model": 424, "d_ff": 1664},
                "params": {
                    "total": 14_886_216,
                    "active": 14_886_216,
                    "total_nonembedding": 11_346_664,
                    "active_nonembedding": 11_346_664,
                },
                "by_component": {"embedding": 3_539_552, "attention": 2_876_416, "ffn": 8_466_432, "norms": 3_816},
                "flops_per_token": 99_738_624,
                "match": {
                    "to": "moe",
                    "on": "active_params",
                    "adjust": "d_model",
                    "quantity": 14_886_216,
                    "reference": 14_772_736,
                    "residual": 14_886_216 / 14_772_736 - 1,
                    "rtol": 0.01,
                    "residual_nonembedding": 11_346_664 / 10_498_560 - 1,
                },
                "tokens_per_expert": {"40500000": 40_501_248.0, "426300000": 426_311_680.0},
                "lr": 3e-3,
                "own_budgets": [],
                "shared_init": {"with": "moe", "tensors": 5, "of": 39},
            },
            {
                "name": "dense-total",
                "kind": "dense",
                "ffn": "dense",
                "widths": {**widths, "d_model": 512, "d_ff": 2048},
                "params": {
                    "total": 21_056_000,
                    "active": 21_056_000,
                    "total_nonembedding": 16_781_824,
                    "active_nonembedding": 16_781_824,
                },
                "by_component": {"embedding": 4_274_176, "attention": 4_194_304, "ffn": 12_582_912, "norms": 4_608},
                "flops_per_token": 138_903_552,
                "match": {
                    "to": "moe",
                    "on": "total_params",
                    "adjust": "d_model",
                    "quantity": 21_056_000,
                    "reference": 21_064_192,
                    "residual": 21_056_000 / 21_064_192 - 1,
                    "rtol": 0.01,
                    "residual_nonembedding": 16_781_824 / 16_790_016 - 1,
                },
                "tokens_per_expert": {"40500000": 40_501_248.0, "426300000": 426_311_680.0},
                "lr": 1e-3,
                "own_budgets": [
                    {"on": "train_flops", "to": "moe", "budget": budget, "tokens": tokens, "steps": steps}
                    | {"quantity": 1.0, "reference": 1.0, "residual": 0.0004, "epochs": tokens / 469e6}
                    for budget, tokens, steps in ((BUDGETS[0], 29_491_200, 450), (BUDGETS[1], 310_640_640, 4740))
                ],
                "shared_init": {"with": "moe", "tensors": 26, "of": 39},
            },
        ],
        "seeds": SEEDS,
        "budgets": BUDGETS,
        "post_hoc": {"arms": [], "seeds": [], "budgets": [], "claims": ["moe-equals-dense-at-equal-total"]},
        "tokens_per_budget": {"40500000": 40_501_248, "426300000": 426_311_680},
        "epochs": {"40500000": 0.09, "426300000": 0.91},
        "vocab_size": 8348,
        "data": {
            "title": "TinyStories",
            "licence": "CDLA-Sharing-1.0",
            "splits": {
                "train": {"documents": 2_096_000, "tokens": 468_102_331, "bytes": 1_890_234_112},
                "selection": {"documents": 21_190, "tokens": 4_730_112, "bytes": 19_100_400},
                "validation": {"documents": 21_990, "tokens": 4_912_776, "bytes": 19_190_318},
            },
            "duplicates": {"exact_dropped": 2119, "normalised_dropped": 341},
            "digest": "d1" * 32,
        },
        "floor": None,
        "floor_reason": None,
        "curve_floor": None,
        "val_targets": 1_048_512,
        "val_targets_total": 4_912_776,
        "runs": runs,
        "table": table,
        "published": [],
        "gaps": gaps,
        "crossovers": [_crossover("moe", "dense-active"), _crossover("moe", "dense-total")],
        "claims": [
            {
                "id": "moe-beats-dense-at-equal-active",
                "kind": "lower",
                "left": ["moe"],
                "right": "dense-active",
                "metric": "best_val_loss",
                "budget": BUDGETS[1],
                "budgets": [BUDGETS[1]],
                **KINDS,
                "matches": [],
                "margin": 0.01,
                "equivalence_margin": None,
                "post_hoc": False,
                "verdict": "supported",
                "reason": "the mean gap lies below −δ = −0.01 with adjusted p = 0.0006 ≤ 0.05",
                "p": {"sup": 0.0003, "ref": 0.9997, "eq": None},
                "p_adjusted": {"sup": 0.0006, "ref": 1.0, "eq": None},
                "contrasts": [_contrast(values, "moe", "dense-active", BUDGETS[1])],
                "post_hoc_contrasts": [],
                "marks": [],
            },
            {
                "id": "moe-equals-dense-at-equal-total",
                "kind": "equivalent",
                "left": ["moe"],
                "right": "dense-total",
                "metric": "best_val_loss",
                "budget": BUDGETS[1],
                "budgets": [BUDGETS[1]],
                **KINDS,
                "matches": [],
                "margin": None,
                "equivalence_margin": 0.015,
                "post_hoc": True,
                "verdict": "refuted",
                "reason": "the mean gap lies outside ±ε = 0.015 with adjusted p = 0.021 ≤ 0.05",
                "p": {"sup": 0.96, "ref": 0.021, "eq": None},
                "p_adjusted": {"sup": 0.96, "ref": 0.021, "eq": None},
                "contrasts": [_contrast(values, "moe", "dense-total", BUDGETS[1])],
                "post_hoc_contrasts": [],
                "marks": ["post hoc", "repeated data"],
            },
            {
                "id": "both-dense-arms-win-small",
                "kind": "lower",
                "left": ["dense-active", "dense-total"],
                "right": "moe",
                "metric": "val_bpb",
                "budget": BUDGETS[0],
                "budgets": [BUDGETS[0]],
                **KINDS,
                "matches": [],
                "margin": 0.0,
                "equivalence_margin": None,
                "post_hoc": False,
                "verdict": "inconclusive",
                "reason": "dense-active diverged (seed 1) and moe collapsed (seed 2): at most inconclusive",
                "p": {"sup": 0.4, "ref": 0.6, "eq": None},
                "p_adjusted": {"sup": 1.0, "ref": 1.0, "eq": None},
                "contrasts": [
                    _contrast(values, left, "moe", BUDGETS[0], 1 / 2.77) for left in ("dense-active", "dense-total")
                ],
                "post_hoc_contrasts": [],
                "marks": ["collapsed"],
            },
        ],
        "contracts": {
            "step_time": {
                "step_s": {"moe": 0.02, "dense-active": 0.015, "dense-total": 0.019},
                "spread": {"moe": 0.04, "dense-active": 0.03, "dense-total": 0.02},
                "measured": "2026-01-03T00:00:00+00:00",
                "environment": {"cpu": "a processor", "device": "cpu", "torch": "2.13.0+cpu", "threads": 2},
                "load": 0.3,
                "busy_cores": 0.02,
                "idle": True,
            },
            "step_time_reason": None,
            "rows": [_contracts(values, left, right, budget) for left, right in pairs for budget in BUDGETS],
        },
        "lr_sweep": {
            "families": [
                {
                    "name": "dense",
                    "members": [{"arm": "dense-active", "lr": 3e-3}, {"arm": "dense-total", "lr": 1e-3}],
                }
            ],
            "choices": [
                {
                    "family": "dense",
                    "budget": budget,
                    "arm": "dense-total" if budget == BUDGETS[1] else None,
                    "lr": 1e-3 if budget == BUDGETS[1] else None,
                    "selection_loss": {"dense-active": None, "dense-total": 1.57},
                    "at_edge": budget == BUDGETS[1],
                    "reason": None if budget == BUDGETS[1] else "dense-active seed 1 is missing",
                }
                for budget in BUDGETS
            ],
            "gaps": [
                {
                    "left": "moe",
                    "right": "dense",
                    "budget": budget,
                    "metric": "best_val_loss",
                    "post_hoc": False,
                    "shared": [{"lr": 1e-3, **_cell(values, "moe", "dense-total", budget)}],
                    "best": {**_cell(values, "moe", "dense-total", budget), "lr": [1e-3, None]},
                    "charged": {**_absent("dense would need 1 token"), "cost_factor": [1, 2]},
                }
                for budget in BUDGETS
            ],
        },
        "curves": curves,
        "routing": routing,
        "samples": samples,
        "scope": [
            "The study measures validation loss. It tests no mechanism: why one arm is ahead is not answered.",
            "Equal parameters are not equal seconds: no wall-clock claim is made.",
            "Intervals are 95 % t intervals, not adjusted for other comparisons.",
        ],
        "provenance": {
            "equipoise": "0.1.0",
            "created": "2026-01-02T03:04:05+00:00",
            "first_finished": "2026-01-03T00:00:00+00:00",
            "amendments": [],
            "mixed": None,
            "commands": ["equipoise run STUDY.toml", "equipoise report DIR"],
            "environments": [
                {
                    "python": "3.11.2",
                    "torch": "2.13.0+cpu",
                    "numpy": "2.4.6",
                    "machine": "x86_64, 2 cores, AVX2",
                    "threads": 2,
                    "dtype": "float32: bf16 is emulated on this CPU",
                }
            ],
            "lock_digest": "10c4" * 16,
            "data_digest": "d1" * 32,
            "study": {"name": "tinystories", "seeds": SEEDS, "budgets": BUDGETS},
        },
    }


def _row(values: dict[Any, Any], arm: str, budget: int, metric: str) -> dict[str, Any]:
    scale = 1 / 2.77 if metric == "val_bpb" else 1.0
    own = {str(seed): values[arm, seed, budget] * scale for seed in SEEDS if values[arm, seed, budget] is not None}
    mean = sum(own.values()) / len(own)
    return {
        "arm": arm,
        "budget": budget,
        "metric": metric,
        "post_hoc": False,
        "seeds": SEEDS,
        "n": len(own),
        "expected_n": 3,
        "mean": mean,
        "sd": math.sqrt(sum((v - mean) ** 2 for v in own.values()) / (len(own) - 1)),
        "values": own,
        "lost": [],
        "diverged": [seed for seed in SEEDS if str(seed) not in own],
        "collapsed": [2] if (arm, budget) == ("moe", BUDGETS[0]) else [],
    }


def _contrast(values: dict[Any, Any], left: str, right: str, budget: int, scale: float = 1.0) -> dict[str, Any]:
    both = {s: (values[left, s, budget], values[right, s, budget]) for s in SEEDS}
    per_seed = {str(s): scale * (a - b) for s, (a, b) in both.items() if a is not None and b is not None}
    n = len(per_seed)
    mean = sum(per_seed.values()) / n
    sd = math.sqrt(sum((v - mean) ** 2 for v in per_seed.values()) / (n - 1))
    half = {2: 12.706, 3: 4.303}[n] * sd / math.sqrt(n)
    return {
        "left": left,
        "right": right,
        "budget": budget,
        "budgets": [budget],
        "statistic": "difference",
        "bounds": [],
        "n": n,
        "expected_n": 3,
        "dropped": [seed for seed in SEEDS if str(seed) not in per_seed],
        "collapsed": ["moe"] if "moe" in (left, right) and budget == BUDGETS[0] else [],
        "mean": mean,
        "sd": sd,
        "ci_low": mean - half,
        "ci_high": mean + half,
        "confidence": 0.95,
        "noise_floor": half * 0.68,
        "per_seed": per_seed,
    }


def _crossover(left: str, right: str) -> dict[str, Any]:
    """Seed 0 crosses at 120M tokens, the others beyond the largest budget."""
    return {
        "left": left,
        "right": right,
        "metric": "best_val_loss",
        "post_hoc": False,
        "budgets": BUDGETS,
        "n": 3,
        "expected_n": 3,
        "per_seed": {"0": 120_000_000.0, "1": None, "2": None},
        "where": {"0": "within", "1": "above", "2": "above"},
        "median": None,
        "low": 120_000_000.0,
        "high": None,
        "mean": None,
        "ci_low": None,
        "ci_high": None,
        "confidence": 0.95,
    }


def _cell(values: dict[Any, Any], left: str, right: str, budget: int) -> dict[str, Any]:
    contrast = _contrast(values, left, right, budget)
    names = ("mean", "sd", "ci_low", "ci_high", "n", "per_seed", "expected_n", "collapsed")
    lower = left if contrast["mean"] < 0 else right
    return {**_absent(None), **{name: contrast[name] for name in names}, "winner": lower, "clear": True}


def _absent(reason: str | None) -> dict[str, Any]:
    numbers = ("mean", "sd", "ci_low", "ci_high", "winner", "left_tokens", "right_tokens")
    how = ("interpolated", "between", "loo_error", "residual")
    nothing = {"n": 0, "per_seed": {}, "expected_n": 3, "clear": False, "collapsed": [], "reason": reason}
    return {**dict.fromkeys((*numbers, *how)), **nothing}


def _contracts(values: dict[Any, Any], left: str, right: str, budget: int) -> dict[str, Any]:
    read = {"interpolated": right, "between": [budget, 2 * budget], "loo_error": 0.0031, "right_tokens": 1.1 * budget}
    return {
        "left": left,
        "right": right,
        "budget": budget,
        "metric": "best_val_loss",
        "post_hoc": False,
        "agreement": {
            "active_params": 0.0077,
            "total_params": -0.29,
            "flops_per_token": -0.014,
            "on": ["active_params"],
        },
        "tokens": _cell(values, left, right, budget),
        "train_flops": {**_cell(values, left, right, budget), **read},
        "seconds": {**_absent("no step_time.json")},
        "flips": [{"between": ["tokens", "train_flops"], "clear": False}],
    }


def rename(value: Any, old: str, new: str) -> Any:
    """Every text equal to `old` (as a value or a key) replaced."""
    return json.loads(json.dumps(value).replace(json.dumps(old), json.dumps(new)))


def make_hostile() -> dict[str, Any]:
    """Every text that a person or a model could write holds what breaks a page, a figure, or a table."""
    results = make_results()
    for old, new in (("moe", "$x_$"), ("dense-active", "_base"), ("dense-total", HOSTILE[:64])):
        kinds = [arm["kind"] for arm in results["arms"]]
        results = rename(results, old, new)
        for arm, kind in zip(results["arms"], kinds, strict=True):
            arm["kind"] = kind
    for field in ("name", "question"):
        results[field] = HOSTILE
    for claim in results["claims"]:
        claim["id"] = claim["reason"] = HOSTILE
        claim["marks"] = [*claim["marks"], HOSTILE]
    for sample in results["samples"]:
        sample["text"] = HOSTILE + " \ud800 \ud83d\ude00"
        sample["prompt"] = f"{HOSTILE} {sample['prompt'][:4]}"
    results["data"]["title"] = HOSTILE
    results["provenance"]["commands"] = [HOSTILE]
    results["provenance"]["environments"][0][HOSTILE] = HOSTILE
    results["provenance"]["study"] = {HOSTILE: HOSTILE}
    results["scope"] = [HOSTILE]
    return results


def make_explorer(results: dict[str, Any], tokens: list[str], num_experts: int = 4, top_k: int = 2) -> dict[str, Any]:
    """Two stories of these tokens for each arm of the study; in layer l token t goes to experts t + l, t + l + 1, …."""
    num_layers = 2
    losses = [[0.05, 0.1, 0.7, 1.0, 2.5, 4.0, 9.0, 0.0, 0.4999][t % 9] for t in range(len(tokens))]

    def story(routed: bool, end: float | None) -> dict[str, Any]:
        experts = [
            [[(t + layer + k) % num_experts for k in range(top_k)] for t in range(len(tokens))]
            for layer in range(num_layers if routed else 0)
        ]
        weights = [[[0.75, 0.25, 0.0, 0.0][:top_k] for _ in layer] for layer in experts]
        return {"tokens": tokens, "losses": losses, "end_loss": end, "experts": experts, "weights": weights}

    share = [[1.0 if i == j else 0.25 for j in range(num_experts)] for i in range(num_experts)]
    top = [[{"token": tokens[5], "share": 0.996, "count": 12}, {"token": tokens[1], "share": 0.5, "count": 99}], []]
    layer = {"coactivation": share, "top_tokens": [*top, *([[]] * (num_experts - 2))]}
    arms = []
    for arm in results["arms"]:
        routed = arm["kind"] == "moe"
        arms.append(
            {
                "arm": arm["name"],
                "top_k": top_k if routed else 0,
                "num_experts": num_experts if routed else 0,
                "stories": [story(routed, 1.5), story(routed, None)],
                "layers": [layer] * num_layers if routed else [],
            }
        )
    return {"budget": results["budgets"][0], "seed": 2, "arms": arms}


@pytest.fixture(scope="session")
def explorer() -> Callable[..., dict[str, Any]]:
    """`make_explorer`, which no other file can import."""
    return make_explorer


@pytest.fixture(scope="session")
def _made() -> dict[str, Any]:
    return make_results()


@pytest.fixture
def results(_made: dict[str, Any]) -> dict[str, Any]:
    """A realistic study; a copy, to be changed at will."""
    return copy.deepcopy(_made)


@pytest.fixture(scope="session")
def hostile() -> dict[str, Any]:
    """The same study with hostile texts; to be left as it is."""
    return make_hostile()
