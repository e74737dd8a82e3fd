"""Writes the tables of docs/scale.md anew, each from the function below that has its name.

    python docs/scale_tables.py           # or: make docs

A table stands between `<!-- table NAME -->` and `<!-- end -->`; what `plan` printed, below its command. Predictions
come from `equipoise.costs`; what was measured is read from docs/performance.md, or stands below with its source. A test
compares the page with what this file makes. Not for: the text around the tables.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from equipoise.accounting import count_flops, count_params
from equipoise.cli.main import call
from equipoise.costs import outlook, update_seconds
from equipoise.hardware import DEFAULT_UTILISATION, HARDWARE, Setting
from equipoise.matching import resolve_arms
from equipoise.micro import PROCESS_BYTES, update_bytes
from equipoise.spec.model import DenseFFN, ModelConfig, MoEFFN
from equipoise.spec.recipe import Optim, Recipe
from equipoise.spec.study import StudySpec, load_study_table, parse_study
from equipoise.study import DataFacts, plan
from equipoise.text import count, scientific, short, size, span

PAGE: Final = Path(__file__).with_name("scale.md")
PERFORMANCE: Final = Path(__file__).with_name("performance.md")
OUTPUT: Final = re.compile(
    r"^```console\n\$ equipoise (?P<words>plan .*)\n```\n\n```text\n…\n(?P<said>.*?)^```$", re.M | re.S
)
MARK: Final = re.compile(r"(<!-- table (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.S)
CPU: Final = "cpu-2-cores"
MIB: Final = 2**20
PRICE: Final = 2.5
"""An example, not an offer."""
FACTS: Final = {
    "quick": DataFacts(vocab_size=512, train_tokens=640_000, certain=False, eval_tokens=64_016),
    "tinystories-cpu": DataFacts(vocab_size=1_024, train_tokens=4_120_878, certain=True, eval_tokens=249_948),
    "budgets-cpu": DataFacts(vocab_size=1_024, train_tokens=4_120_878, certain=True, eval_tokens=249_948),
}
"""What is known of the data of the studies that were run: docs/log.md and the README."""
STUDIES_S: Final = {"quick": 76.0, "tinystories-cpu": 16 * 60.0, "budgets-cpu": 3600.0}
"""Seconds that studies took from their first run to their last: docs/performance.md (86 s less 10), docs/log.md."""
SHAPES: Final = {  # name in docs/performance.md: V, d_model, L, heads, d_expert, S, sequences, threads
    "A": (4096, 256, 8, 8, 512, 512, 16, 2),
    "B": (4096, 128, 4, 4, 256, 256, 32, 2),
    "B-wide-heads": (4096, 128, 4, 2, 256, 256, 32, 2),
    "tinystories-cpu": (1024, 64, 4, 2, 64, 128, 8, 1),
}
OTHERS: Final = (  # name, d_model, L, heads, cards, tokens/s a card
    ("760m", 1536, 24, 12, 8, 63_147),
    ("1b", 2048, 24, 16, 8, 45_455),
    ("3b", 2560, 32, 20, 16, 24_142),
    ("7b", 4096, 32, 32, 8, 10_643),
)
"""Dense models on H100 80GB cards in bfloat16 at 2,048 tokens of context, nothing computed twice: llm-foundry,
scripts/train/benchmarking/README.md. Their layers have two matrices of 4·d_model and V 50,368; counted here as SwiGLU
of the same parameters."""


def tables() -> dict[str, Callable[[], Iterator[Sequence[str]]]]:
    """Every table of the page: its rows, the first one its headings."""
    return {
        "devices": devices,
        "studies-measured": studies_measured,
        "updates-measured": updates_measured,
        "others-measured": others_measured,
        "memory-measured": memory_measured,
        "ladder": ladder,
        "trillion": trillion,
        "trillion-memory": trillion_memory,
    }


def devices() -> Iterator[Sequence[str]]:
    yield ("`--device`", "what", "bfloat16 TFLOP/s", "float32 TFLOP/s", "GB", "GB/s", "source")
    for one in HARDWARE.values():
        half = "—" if one.bfloat16_flops is None else f"{one.bfloat16_flops / 1e12:,.4g}"
        rest = (f"{one.float32_flops / 1e12:.3g}", f"{one.memory_bytes / 1e9:.0f}", f"{one.bandwidth / 1e9:,.0f}")
        yield (f"`{one.name}`", one.title, half, *rest, one.source)


# ------------------------------------------------------------------------------------------------ predicted, measured


def studies_measured() -> Iterator[Sequence[str]]:
    yield ("study", "FLOPs", "predicted", "measured", "measured ÷ predicted", "utilisation it was")
    for name, measured in STUDIES_S.items():
        spec = parse_study(load_study_table(name)[0])
        found = outlook(spec, FACTS[name], on(CPU))
        flops = scientific(plan(spec, FACTS[name])["train_flops"])
        yield (name, flops, span(found["study_s"]), span(measured), *ratio(measured / found["study_s"]))


def updates_measured() -> Iterator[Sequence[str]]:
    yield ("shape", "model", "threads", "predicted ms", "measured ms", "measured ÷ predicted", "utilisation it was")
    for shape, kind, cells in step_rows():
        model, recipe = shaped(shape, kind)
        predicted = 1e3 * max(update_seconds(model, recipe, HARDWARE[CPU], DEFAULT_UTILISATION))
        measured = float(cells[0].replace(",", ""))
        times = (f"{predicted:,.1f}", f"{measured:,.1f}")
        yield (shape, kind, str(recipe.threads), *times, *ratio(measured / predicted))


def others_measured() -> Iterator[Sequence[str]]:
    yield (
        "model",
        "parameters",
        "cards",
        "predicted tokens/s a card",
        "measured",
        "predicted ÷ measured",
        "utilisation it was",
    )
    for name, width, layers, heads, cards, measured in OTHERS:
        ffn = DenseFFN(d_ff=round(8 * width / 3 / 8) * 8)
        model = ModelConfig(num_layers=layers, num_heads=heads, d_model=width, vocab_size=50_368, ffn=ffn)
        recipe = Recipe(seq_len=2048, batch_tokens=2**20, balance_group=4, optim=Optim(lr=1e-3))
        seconds = max(update_seconds(model, recipe, HARDWARE["h100"], DEFAULT_UTILISATION))
        predicted = recipe.batch_tokens / seconds
        params = short(count_params(model).total)
        yield (name, params, str(cards), count(predicted), count(measured), *ratio(predicted / measured))


def memory_measured() -> Iterator[Sequence[str]]:
    yield ("shape", "model", "predicted MiB", "measured MiB", "predicted ÷ measured", "the same without the process")
    for shape, kind, cells in step_rows():
        model, recipe = shaped(shape, kind)
        predicted = update_bytes(model, recipe, recipe.num_sequences) / MIB
        measured = float(cells[5].partition(" ")[0].replace(",", ""))
        process = PROCESS_BYTES / MIB
        less = (predicted - process) / (measured - process)
        yield (shape, kind, f"{predicted:,.0f}", f"{measured:,.0f}", f"{predicted / measured:.2f}", f"{less:.2f}")


def step_rows() -> Iterator[tuple[str, str, list[str]]]:
    """Shape, kind of model and the other cells of our rows in the first table of steps."""
    for line in PERFORMANCE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 8 and cells[0] in SHAPES and cells[1] in ("dense", "MoE"):
            yield cells[0], cells[1], cells[2:]


def shaped(shape: str, kind: str) -> tuple[ModelConfig, Recipe]:
    vocab_size, d_model, layers, heads, d_expert, seq_len, sequences, threads = SHAPES[shape]
    ffn = DenseFFN(d_ff=2 * d_expert) if kind == "dense" else MoEFFN(num_experts=4, top_k=2, d_expert=d_expert)
    model = ModelConfig(num_layers=layers, num_heads=heads, d_model=d_model, vocab_size=vocab_size, ffn=ffn)
    recipe = Recipe(seq_len=seq_len, batch_tokens=sequences * seq_len, threads=threads, optim=Optim(lr=1e-3))
    return model, recipe


def ratio(value: float) -> tuple[str, str]:
    """Slower than predicted by, and what utilisation would have predicted it."""
    return f"{value:.2f}", f"{DEFAULT_UTILISATION / value:.2f}"


# ------------------------------------------------------------------------------------------------ the ladder


def ladder() -> Iterator[Sequence[str]]:
    yield (
        *("study", "runs", "active / total parameters of the MoE", "longest run, tokens", "FLOPs", "device"),
        *(
            "device-hours",
            "time",
            "starting ÷ computing",
            "largest run's memory",
            "its checkpoint",
            f"money at {PRICE:.2f}",
        ),
    )
    for name, setting in (
        ("quick", on(CPU)),
        ("tinystories-cpu", on(CPU)),
        ("budgets-cpu", on(CPU)),
        ("gutenberg", on("h100")),
        ("tinystories", on("h100")),
        ("budgets", on("h100")),
        ("trillion", on("h100", num_devices=192, processes_per_run=64)),
    ):
        spec = the_trillion() if name == "trillion" else parse_study(load_study_table(name)[0])
        facts = FACTS.get(name, unseen(spec))
        found, planned = outlook(spec, facts, setting), plan(spec, facts)
        arms = list(found["arms"].values())
        moe = next(arm for arm in planned["arms"] if arm["kind"] == "moe")["params"]
        where = f"{setting.num_devices} × {setting.hardware.name}" if setting.num_devices > 1 else setting.hardware.name
        yield (
            name,
            count(planned["num_runs"]),
            f"{short(moe['active'])} / {short(moe['total'])}",
            short(max(spec.budgets)),
            scientific(planned["train_flops"]),
            where,
            f"{found['device_s'] / 3600:,.3g}" if found["device_s"] < 3.6e6 else count(found["device_s"] / 3600),
            span(found["study_s"]),
            "—" if setting.hardware.cores else f"{max(arm['launching_s'] / arm['update_s'] for arm in arms):.2g}",
            size(max(arm["process_bytes"] for arm in arms)),
            size(max(arm["checkpoint_bytes"] for arm in arms)),
            "—" if setting.hardware.cores else f"{found['money']:,.2f}",
        )


def trillion() -> Iterator[Sequence[str]]:
    yield (
        *("arm", "active", "total", "FLOPs of a run", "device-hours of a run", "days on 64"),
        *("device-hours, 3 seeds", "money", "the same with the MoE at 0.2"),
    )
    spec = the_trillion()
    models = {name: arm.model for name, arm in resolved(spec).items()}
    found = outlook(spec, unseen(spec), on("h100", num_devices=192, processes_per_run=64))
    slow = outlook(spec, unseen(spec), on("h100", num_devices=192, processes_per_run=64, of_arm={"moe": 0.2}))
    (budget,) = spec.budgets
    steps = round(budget / spec.recipe.batch_tokens)
    for name, model in models.items():
        arm, params = found["arms"][name], count_params(model)
        flops = count_flops(model, spec.recipe.seq_len).training * steps * spec.recipe.batch_tokens
        run_s = arm["run_s"][str(budget)]
        yield (
            name,
            short(params.active),
            short(params.total),
            scientific(flops),
            count(run_s * 64 / 3600),
            f"{run_s / 86_400:.1f}",
            count(arm["device_s"] / 3600),
            count(arm["device_s"] / 3600 * PRICE),
            count(slow["arms"][name]["device_s"] / 3600),
        )
    sums = [sum(x["arms"][name]["device_s"] for name in models) / 3600 for x in (found, slow)]
    yield ("together", "", "", "", "", "", count(sums[0]), count(sums[0] * PRICE), count(sums[1]))


def trillion_memory() -> Iterator[Sequence[str]]:
    yield (
        *("arm", "sequences a pass", "weights, gradients, AdamW", "bfloat16 copies", "activations", "together"),
        *("smallest device it fits", "checkpoint", "sent by a device an update"),
    )
    spec = the_trillion()
    for rows in (spec.recipe.micro_sequences, 1):
        recipe = dataclasses.replace(spec.recipe, balance_group=rows, micro_sequences=rows)
        cut = dataclasses.replace(spec, recipe=recipe)
        settings = (on(name, num_devices=64, processes_per_run=64) for name in ("h100", "h200", "b200"))
        arms = {setting.hardware.name: outlook(cut, unseen(spec), setting)["arms"] for setting in settings}
        for name, arm in arms["h100"].items():
            total = count_params(resolved(spec)[name].model).total
            yield (
                name,
                str(rows),
                *(size(arm[f"{part}_bytes"]) for part in ("state", "copy", "activation", "process")),
                next((device for device, found in arms.items() if found[name]["fits"]), "**none**"),
                size(arm["checkpoint_bytes"]),
                size(2 * 63 / 64 * 4 * total),
            )


def the_trillion() -> StudySpec:
    """The study file of the page."""
    (body,) = re.findall(r"^```toml\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return parse_study(tomllib.loads(body))


def unseen(spec: StudySpec) -> DataFacts:
    """What is known of data that no one has prepared: the vocabulary asked for."""
    return DataFacts(vocab_size=spec.tokenizer.vocab_size, train_tokens=None, certain=False)  # type: ignore[union-attr]


def resolved(spec: StudySpec) -> Any:
    return resolve_arms(spec.arms, unseen(spec).vocab_size, spec.recipe.seq_len)


def on(device: str, **changes: Any) -> Setting:
    setting = Setting(hardware=HARDWARE[device], of_arm={}, price_per_hour=PRICE)
    return dataclasses.replace(setting, **changes)


# ------------------------------------------------------------------------------------------------ the page


def page(text: str) -> str:
    """`text` with every table made anew. Raises KeyError for a table that no function makes."""
    made = tables()

    def anew(found: re.Match[str]) -> str:
        rows = [list(row) for row in made[found["name"]]()]
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        lines.insert(1, "|" + "---|" * len(rows[0]))
        return found[1] + "\n" + "\n".join(lines) + "\n\n" + found[3]

    def said(found: re.Match[str]) -> str:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            call(shlex.split(found["words"]))
        _, start, rest = output.getvalue().partition("predicted for")
        printed = "\n".join(line.rstrip() for line in (start + rest).splitlines())
        return found[0].replace(found["said"], printed + "\n")

    return OUTPUT.sub(said, MARK.sub(anew, text))


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
