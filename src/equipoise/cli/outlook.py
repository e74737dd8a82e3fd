"""`equipoise plan --device`: reads what a study would run on, and shows what it would cost there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from equipoise.cli.console import out, show_table
from equipoise.errors import ConfigError
from equipoise.faults import cut, printable
from equipoise.hardware import DEFAULT_UTILISATION, USABLE_SHARE, Setting, find_hardware
from equipoise.text import count, number, short, size, span


def read_setting(
    device: str | None,
    utilisation: Sequence[str] | None,
    num_devices: int | None,
    processes_per_run: int | None,
    price_per_hour: str | None,
) -> Setting | None:
    """What `--device` and the options beside it ask for; None without any. ConfigError for what cannot be read."""
    given = {
        "--utilisation": utilisation,
        "--devices": num_devices,
        "--processes-per-run": processes_per_run,
        "--price-per-hour": price_per_hour,
    }
    if device is None:
        alone = [name for name, value in given.items() if value]
        if alone:
            raise ConfigError(f"{alone[0]}: goes with --device NAME, which is missing")
        return None
    hardware = find_hardware(device)
    everywhere, of_arm = DEFAULT_UTILISATION, dict[str, float]()
    for text in utilisation or ():
        arm, mark, value = text.rpartition("=")
        share = _number(value)
        if share is None or not 0 < share <= 1:
            raise ConfigError(f"--utilisation {_shown(text)}: expected a number above 0 and at most 1, or ARM=NUMBER")
        if mark:
            of_arm[arm] = share
        else:
            everywhere = share
    price = None if price_per_hour is None else _number(price_per_hour)
    if price_per_hour is not None and (price is None or not 0 <= price < 1e9):
        raise ConfigError(f"--price-per-hour {_shown(price_per_hour)}: expected a number of 0 or more, below a billion")
    return Setting(
        hardware=hardware,
        num_devices=1 if num_devices is None else num_devices,
        processes_per_run=1 if processes_per_run is None else processes_per_run,
        utilisation=everywhere,
        of_arm=of_arm,
        price_per_hour=price,
    )


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value - value == 0 else None  # neither infinite nor no number at all


def _shown(text: str) -> str:
    return cut(printable(text), 40)


def show_outlook(planned: Mapping[str, Any]) -> None:
    """The prediction as tables on stdout, and what is doubtful about it."""
    found, budgets = planned["device"], [b["budget"] for b in planned["budgets"]]
    arms = found["arms"]
    reached = sorted({arm["utilisation"] for arm in arms.values()})
    assumed = (
        f"{reached[0]:g} of it for every arm"
        if len(reached) == 1
        else "of it " + ", ".join(f"{arm['utilisation']:g} for {name}" for name, arm in arms.items())
    )
    out().print()
    out().print(
        f"predicted for {count(found['num_devices'])} × {found['title']} ({found['name']}): {found['dtype']}, peak "
        f"{found['peak_flops'] / 1e12:,.4g} TFLOP/s a device, assumed to reach {assumed} (--utilisation)\n",
        soft_wrap=True,
    )
    show_table(
        "Predicted time",
        ["arm", "ms/update", "tokens/s", *(f"a run of {short(b)}" for b in budgets), "device-hours of all runs"],
        [
            [
                name,
                f"{arm['update_s'] * 1e3:,.1f}",
                count(arm["tokens_per_s"]),
                *map(span, arm["run_s"].values()),
                hours(arm["device_s"]),
            ]
            for name, arm in arms.items()
        ],
    )
    show_table(
        "Memory of a run on a device",
        ["arm", "weights, gradients, AdamW", "copies", "activations", "together", "fits", "checkpoint"],
        [
            [
                name,
                *(size(arm[f"{part}_bytes"]) for part in ("state", "copy", "activation", "process")),
                "yes" if arm["fits"] else "NO",
                size(arm["checkpoint_bytes"]),
            ]
            for name, arm in arms.items()
        ],
    )
    for line in lines(found):
        out().print(line, soft_wrap=True)


def lines(found: Mapping[str, Any]) -> list[str]:
    """The sums of a prediction, a sentence each, and its warnings."""
    at_once = f"{count(found['jobs'])} run(s) at a time"
    if found["processes_per_run"] > 1:
        at_once += f", {count(found['processes_per_run'])} processes each"
    said = [
        f"whole study: about {span(found['study_s'])} with {at_once}; device-hours: {hours(found['device_s'])} at "
        f"work, {hours(found['held_s'])} until the last run ends"
    ]
    if found["money"] is not None:
        price = f"{found['price_per_hour']:,.2f}"
        said.append(f"money: {found['money']:,.2f} at {price} a device-hour, for all devices until the last run ends")
    tokens = found["train_token_bytes"]
    corpus = f"the training tokens {size(tokens)}, " if tokens is not None else ""
    said.append(
        f"data: {found['bytes_per_token']} bytes a token on disk; {corpus}"
        f"the longest run without repeating any {size(found['once_through_bytes'])}"
    )
    said.append("not counted: preparing data, starts, samples, writing checkpoints, devices waiting for each other")
    arms = found["arms"]
    too_large = [name for name, arm in arms.items() if not arm["fits"]]
    if too_large:
        limit = f"{found['memory_bytes'] / 1e9:,.0f} GB of {found['name']}"
        share = f", of which a run may take {number(USABLE_SHARE, 1)}" if found["name"][:3] != "cpu" else ""
        said.append(
            f"warning: does not fit: {', '.join(too_large)} in the {limit}{share}; what could help: fewer sequences a "
            "forward pass (recipe.micro_sequences) against activations, a larger device against the rest; more devices "
            "a run do not, each holds everything"
        )
    moving = [name for name, arm in arms.items() if arm["moving_s"] >= arm["update_s"]]
    if moving:
        said.append(
            f"warning: {', '.join(moving)}: moving weights takes longer than computing at this utilisation, and is "
            "what was counted; more sequences a forward pass (recipe.micro_sequences) move them less often"
        )
    launching = [
        f"{name} {arm['launching_s'] * 1e3:,.1f} ms"
        for name, arm in arms.items()
        if arm["launching_s"] > arm["update_s"]
    ]
    if launching:
        said.append(
            "warning: starting operations one by one would take longer than computing them, about "
            f"{', '.join(launching)} an update; not counted, since compiled steps have fewer; more sequences a forward "
            "pass (recipe.micro_sequences) help"
        )
    if found["idle_devices"]:
        said.append(f"warning: {count(found['idle_devices'])} of {count(found['num_devices'])} devices would be idle")
    return said


def hours(seconds: float) -> str:
    """Seconds as hours: three significant digits below a thousand.

    >>> hours(36), hours(3.6e5), hours(3.6e9)
    ('0.01', '100', '1,000,000')
    """
    value = seconds / 3600
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
