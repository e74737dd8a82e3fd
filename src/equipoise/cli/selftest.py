"""`equipoise selftest`: whether models and training do on this machine what they must."""

from __future__ import annotations

import typer

from equipoise.cli.console import DeviceOption, JsonOption, check_device, emit_json, say, show_table
from equipoise.text import scientific


def selftest(device: DeviceOption = "auto", as_json: JsonOption = False) -> None:
    """Hold routed models to dense ones, gradients, causality and resume, in under a minute; exit 1 naming what failed.

    Example: equipoise selftest --device cpu
    """
    check_device(device)
    from equipoise.selftest import run_checks

    compute, checks = run_checks(device)  # type: ignore[arg-type]  # checked above
    failed = [check.name for check in checks if check.status == "failed"]
    if as_json:
        emit_json({"compute": compute.reason, "ok": not failed, "failed": failed, "checks": checks})
    else:
        show_table(
            f"Self-test: {compute.reason}",
            ["check", "compared", "largest difference", "tolerance", "ok"],
            [
                [
                    check.name,
                    check.compared,
                    scientific(check.difference),
                    f"{'above ' if check.above else ''}{check.tolerance:g}",
                    "FAILED" if check.status == "failed" else check.status,
                ]
                for check in checks
            ],
            left=2,
        )
    for check in checks:
        if check.note:
            say(f"{check.name}: {check.status}: {check.note}")
    if failed:
        say(f"error: selftest: failed: {', '.join(failed)}")
        raise typer.Exit(1)
