"""What the JSON files of a run directory hold: names and types of their fields, and the check that a file holds them.

A digest in a file shows accidents, not intent: whoever made the file made the digest. So what is read is held to these
shapes before anything is computed from it. Fields that are not named here are let through; a float may be written as a
whole number. Not for: numbers that must agree with each other (their readers check that), or study files
(`config.load`).
"""

from __future__ import annotations

from typing import Any, NotRequired, Required

from typing_extensions import TypedDict  # of Python's own, pydantic reads them from 3.12 on only

from equipoise.config import misfit
from equipoise.errors import IntegrityError


class LayerRouting(TypedDict, total=False):
    """Diagnostics of one routed layer; see `routing.diagnose`."""

    usage: list[float]
    busiest_frac: float
    usage_variance: float
    load_cv: float
    max_vio: float
    usage_entropy: float
    router_entropy: float | None
    log_z: float | None
    dead: list[int]
    topk_share: float
    collapsed: bool


class Chosen(TypedDict):
    """Choices of experts that are followed over training; see `routing.packed`."""

    tokens: int
    layers: list[str]


class Row(TypedDict, total=False):
    """A line of `metrics.jsonl` (of either kind) or of `samples.jsonl`."""

    kind: str
    step: Required[int]
    tokens: int
    flops: int
    lr: float
    lm_loss: float
    load_balance: float | None
    router_z: float | None
    grad_norm: float | None
    loss: float
    bpb: float | None
    elapsed_s: float
    tokens_per_s: float
    routing: list[LayerRouting]
    chosen: Chosen
    prompt: str
    text: str


class Branched(TypedDict):
    """`branch.json`, and `branched_from` of a summary."""

    step: int
    checkpoint: str


class RecordedFile(TypedDict):
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


class Floor(TypedDict, total=False):
    """What a grammar scores itself; see `packing.Floor`."""

    loss: Required[float]
    bpb: Required[float]
    loss_se: float | None
    bpb_se: float | None
    num_documents: int


class Summary(TypedDict, total=False):
    """`summary.json`."""

    status: Required[str]
    files: Required[dict[str, RecordedFile]]
    arm: str
    seed: int
    budget: int
    branched_from: Branched | None
    steps: int
    tokens: int
    split: str
    epochs: float
    flops_per_token: int
    train_flops: int
    params: dict[str, int]
    train_s: float
    eval_s: float
    sample_s: float
    final_score_s: float | None
    tokens_per_s: float | None
    peak_memory_bytes: int | None
    num_spikes: int | None
    resumed_elsewhere: list[int]
    init: dict[str, list[Any]]
    val_loss: float | None
    val_bpb: float | None
    best_val_loss: float | None
    best_val_bpb: float | None
    best_step: int | None
    selection_loss: float | None
    val_targets: int | None
    val_targets_total: int | None
    floor: Floor | None
    curve_floor: Floor | None
    floor_reason: str | None
    routing: list[LayerRouting]
    best_routing: list[LayerRouting]
    collapsed: bool
    best_collapsed: bool
    message: str | None


class Amendment(TypedDict):
    """What was added to a locked study."""

    date: str
    added: dict[str, list[Any]]
    after_first_run: bool


class LockFile(TypedDict):
    """`lock.json` of a study."""

    digest: str
    study: dict[str, Any]
    models: dict[str, dict[str, Any]]
    data: str
    dataset: dict[str, Any]
    created: str
    command: str
    first_finished: str | None
    amendments: list[Amendment]


class CheckpointState(TypedDict):
    """`state.json` of a checkpoint."""

    step: int
    run: str
    state: dict[str, Any]


RowMarks = TypedDict("RowMarks", {"metrics.jsonl": RecordedFile, "samples.jsonl": RecordedFile})
"""What `record.mark_rows` gives."""


class SessionState(TypedDict):
    """`state` of a checkpoint that a session saved; see `session.Progress`."""

    progress: dict[str, Any]
    rows: RowMarks
    environments: NotRequired[list[dict[str, Any]]]
    branch: NotRequired[Branched | None]


class Manifest(TypedDict):
    """`manifest.json` of a checkpoint."""

    schema_version: int
    step: int
    files: dict[str, RecordedFile]


class Environments(TypedDict):
    """`environment.json`."""

    environments: list[dict[str, Any]]


def hold(where: object, value: Any, shape: Any) -> None:
    """IntegrityError naming `where` and the first field that is missing or of another type than `shape` says."""
    fault = misfit(shape, value)
    if fault:
        raise IntegrityError(f"{where}: {fault}")
