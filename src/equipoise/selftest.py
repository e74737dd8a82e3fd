"""What a user runs to trust a machine: identities that must hold of models and training, measured there in seconds.

Each check reaches the same numbers by two ways and reports the largest difference relative to the largest number. A
routed model can be known by them without being trusted: they hold for any weights. Not for: speed (`bench`), versions
and disk (`doctor`), or the fine print, which the tests hold to oracles.

Shapes: B sequences, S sequence, T = B·S tokens, D d_model, F width, E experts, K top-k, V vocabulary, P parameters.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from equipoise.data.prepare import prepare
from equipoise.device import Compute, choose_compute
from equipoise.errors import EquipoiseError, Interrupted
from equipoise.files import describe_file
from equipoise.model.layers import swiglu
from equipoise.model.moe import MoE, router_losses
from equipoise.model.transformer import Transformer, build, mean_loss
from equipoise.optim import make_adamw
from equipoise.parity import GPU_CHECKS, Skipped
from equipoise.record import masked, read_rows
from equipoise.rng import stream
from equipoise.spec.data import ByteTokenizer, GrammarCorpus
from equipoise.spec.model import BalanceLoss, DenseFFN, ModelConfig, MoEFFN, NoBalance
from equipoise.spec.recipe import Kernels, Optim, Recipe, Samples
from equipoise.spec.run import RunConfig
from equipoise.step import train_step
from equipoise.train import train

# The sizes of every model and batch: small, no two alike.
SEED: Final = 0
B: Final = 8
S: Final = 16
F: Final = 40
V: Final = 97


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the self-test."""

    name: str
    """Short name."""
    compared: str
    """What is held against what."""
    difference: float | None
    """The largest difference, relative to the largest number; None when skipped, or when there is no finite one."""
    tolerance: float
    """What it may be; for a gradient that must not vanish, what it has to exceed."""
    above: bool
    """Whether the value has to be above the tolerance instead of within it."""
    status: Literal["ok", "failed", "skipped"]
    """How it ended."""
    note: str
    """Why it failed without a number, or was skipped; else empty."""


# ------------------------------------------------------------------------------------------------ models to compare

DENSE: Final = DenseFFN(d_ff=F)
TOP_2: Final = MoEFFN(num_experts=5, top_k=2, d_expert=F)
TOP_1: Final = MoEFFN(num_experts=5, top_k=1, d_expert=F, renormalize=False)


def _model(ffn: DenseFFN | MoEFFN, device: torch.device, kernels: Kernels | None = None) -> Transformer:
    """With the kernels that training takes on this device, unless others are named."""
    return build(_config(ffn), SEED, device, kernels or _kernels(device))


def _kernels(device: torch.device) -> Kernels:
    return "fused" if device.type == "cpu" else "plain"


def _config(ffn: DenseFFN | MoEFFN) -> ModelConfig:
    """Small, with wide weights (std 0.2, ten times the usual): every part then moves the logits."""
    return ModelConfig(num_layers=2, num_heads=4, num_kv_heads=2, d_model=48, vocab_size=V, ffn=ffn, init_std=0.2)


def _tokens(device: torch.device) -> tuple[Tensor, Tensor]:
    """inputs_BS and targets_BS, int64."""
    windows = torch.from_numpy(stream(SEED, "data", "selftest").integers(V, size=(B, S + 1)))
    return windows[:, :-1].to(device), windows[:, 1:].to(device)


def _logits(model: Transformer, inputs_BS: Tensor) -> Tensor:
    with torch.no_grad():
        return model.logits(model(inputs_BS).hidden_TD)


def _lm_gradients(model: Transformer) -> dict[str, Tensor]:
    """Gradient of the language-model loss alone by parameter, on the tokens of `_tokens`."""
    inputs_BS, targets_BS = _tokens(model.embed.weight.device)
    loss = mean_loss(model, model(inputs_BS), targets_BS)
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, found, strict=True))


def _apart(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected number; NaN when nothing was expected."""
    with torch.no_grad():
        return float((found - expected).abs().max() / expected.abs().max())


# ------------------------------------------------------------------------------------------------ the checks


def _one_expert(device: torch.device) -> float:
    return _from_dense(MoEFFN(num_experts=1, top_k=1, d_expert=F), device)


def _identical(device: torch.device) -> float:
    return _from_dense(TOP_2, device)


def _from_dense(ffn: MoEFFN, device: torch.device) -> float:
    """A routed model all of whose experts are the dense layer, against the dense model; their gradients add up."""
    dense, moe = _model(DENSE, device), _model(ffn, device)
    theirs = moe.state_dict()
    for name, tensor in dense.state_dict().items():
        theirs[name if name in theirs else name.replace(".ffn.", ".ffn.experts.")].copy_(tensor)
    inputs_BS, _ = _tokens(device)
    apart = [_apart(_logits(moe, inputs_BS), _logits(dense, inputs_BS))]
    found = _lm_gradients(moe)
    for name, expected in _lm_gradients(dense).items():
        summed = found[name] if name in found else found[name.replace(".ffn.", ".ffn.experts.")].sum(dim=0)
        apart.append(_apart(summed, expected))
    return _worst(apart)


def _all(device: torch.device) -> float:
    """K = E: every expert on every token, weighted by the softmax of the router's products."""
    moe = _model(dataclasses.replace(TOP_2, top_k=5), device).get_submodule("blocks.0.ffn")
    assert isinstance(moe, MoE)
    parameters = dict(moe.named_parameters())
    draws = stream(SEED, "data", "selftest", "hidden").standard_normal((2, B * S, 48), dtype="float32")
    x_TD, out_TD = torch.from_numpy(draws).to(device)
    x_TD.requires_grad_()
    weights_TE = (x_TD @ parameters["router.weight"].T).softmax(dim=-1)
    stacks = (parameters[f"experts.{name}"] for name in ("w_gate", "w_up", "w_down"))
    expected_TD = torch.stack(
        [weight_T.unsqueeze(1) * swiglu(x_TD, *w) for weight_T, *w in zip(weights_TE.T, *stacks, strict=True)]
    ).sum(dim=0)
    found_TD: Tensor = moe(x_TD)[0]
    with_respect_to = [x_TD, *parameters.values()]
    gradients = [torch.autograd.grad((y_TD * out_TD).sum(), with_respect_to) for y_TD in (found_TD, expected_TD)]
    return _worst([_apart(found_TD, expected_TD), *(_apart(*pair) for pair in zip(*gradients, strict=True))])


def _expert_order(device: torch.device) -> float:
    apart = []
    for ffn in (TOP_2, TOP_1):
        model, other = _model(ffn, device), _model(ffn, device)
        order = torch.tensor([3, 0, 4, 1, 2], device=device)
        for name, tensor in other.state_dict().items():
            if ".experts." in name or ".router." in name:
                tensor.copy_(tensor[order])
        inputs_BS, _ = _tokens(device)
        with torch.no_grad():
            outputs = [model(inputs_BS), other(inputs_BS)]
            losses = [torch.stack(router_losses(output.routing, 1)) for output in outputs]
        apart += [_apart(_logits(other, inputs_BS), _logits(model, inputs_BS)), _apart(losses[1], losses[0])]
    return _worst(apart)


def _router_gradient(device: torch.device) -> float:
    """The smallest over routers of the largest element."""
    gradients = [_lm_gradients(_model(ffn, device)).items() for ffn in (TOP_2, TOP_1)]
    return min(float(grad.abs().max()) for found in gradients for name, grad in found if ".router." in name)


def _linear(term: Literal["balance", "z"], device: torch.device) -> float:
    """What a coefficient adds to the gradient of an update, against its multiple of the router loss's own gradient."""
    model = _model(TOP_2, device)
    losses = dict(zip(("balance", "z"), router_losses(model(_tokens(device)[0]).routing, 1), strict=True))
    parameters = list(model.parameters())
    own = torch.autograd.grad(losses[term], parameters, allow_unused=True, materialize_grads=True)
    own_P = torch.cat([gradient.flatten() for gradient in own])
    without_P = _update(_run(0.0, 0.0), device)[0]
    apart = []
    for coef in (1.0, 4.0):
        run = _run(coef, 0.0) if term == "balance" else _run(0.0, coef)
        apart.append(_apart(_update(run, device)[0] - without_P, coef * own_P))
    return _worst(apart)


def _micro_batches(device: torch.device) -> float:
    """Groups of two sequences for the balance loss, all of a batch at once or some at a time."""
    runs = [_run(1.0, 1.0, balance_group=2, micro_sequences=micro) for micro in (8, 4, 2)]
    (whole_P, losses), *cut = [_update(run, device) for run in runs]
    return _worst(
        [value for gradient_P, other in cut for value in (_apart(gradient_P, whole_P), _apart(other, losses))]
    )


def _run(balance_coef: float, z_coef: float, balance_group: int = B, micro_sequences: int = B) -> RunConfig:
    recipe = Recipe(
        seq_len=S,
        batch_tokens=B * S,
        balance_group=balance_group,
        micro_sequences=micro_sequences,
        optim=Optim(lr=1e-3, grad_clip=0.0),
    )
    balance = BalanceLoss(coef=balance_coef) if balance_coef else NoBalance()
    model = _config(dataclasses.replace(TOP_2, balance=balance, z_coef=z_coef))
    return RunConfig(arm="selftest", seed=SEED, budget=B * S, model=model, recipe=recipe, data="")


def _update(run: RunConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """(gradient_P of one update, its losses): at rate 0, so that the weights stay."""
    model = build(run.model, SEED, device, _kernels(device))
    stats = train_step(model, make_adamw(model, run.recipe.optim), *_tokens(device), run, 0.0)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    losses = torch.tensor([stats.lm_loss, stats.load_balance or 0.0, stats.router_z or 0.0])
    return torch.cat([gradient.flatten() for gradient in gradients]), losses


def _causal(kind: Literal["dense", "moe"], device: torch.device) -> float:
    """Change one token: nothing before it and no other sequence may move, and something after it has to."""
    apart = []
    inputs_BS, _ = _tokens(device)
    for ffn in (DENSE,) if kind == "dense" else (TOP_2, TOP_1):
        model = _model(ffn, device)
        before = _logits(model, inputs_BS)
        for t in (1, S // 2, S - 2):
            changed_BS = inputs_BS.clone()
            changed_BS[1, t] = (changed_BS[1, t] + 1) % V
            moved_BS = (_logits(model, changed_BS) - before).abs().amax(dim=-1).view(B, S) / before.abs().max()
            if not float(moved_BS[1, t + 1 :].min()) > 1e-5:
                raise EquipoiseError(f"position {t} was changed and not every later one moved: nothing is to be seen")
            moved_BS[1, t:] = 0.0
            apart.append(float(moved_BS.max()))
    return _worst(apart)


def _resume(device: torch.device) -> float:
    """A short run on the built-in grammar: the largest difference between weights, moments and validation losses."""
    where: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    with tempfile.TemporaryDirectory(prefix="equipoise-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        corpus = GrammarCorpus(num_documents=20, num_validation=4, num_selection=2)
        dataset = prepare(corpus, ByteTokenizer(), root / "cache")
        recipe = Recipe(
            seq_len=64,
            batch_tokens=256,
            balance_group=2,
            optim=Optim(lr=3e-3),
            num_evals=2,
            curve_tokens=1024,
            eval_tokens=1024,
            samples=Samples(num_tokens=4),
        )
        model = dataclasses.replace(
            _config(dataclasses.replace(TOP_2, z_coef=1e-3)), vocab_size=dataset.vocab_size, init_std=0.02
        )
        run = RunConfig(arm="selftest", seed=SEED, budget=8 * 256, model=model, recipe=recipe, data=dataset.digest)
        train(run, root / "straight", dataset, device=where)
        try:
            polls = iter(range(10_000))
            train(run, root / "resumed", dataset, device=where, stop_signal=lambda: 2 * (next(polls) >= 13))
            raise EquipoiseError("the run did not stop when asked to")
        except Interrupted:
            train(run, root / "resumed", dataset, device=where)
        return _worst(list(_files_apart(root / "straight", root / "resumed")))


def _files_apart(one: Path, other: Path) -> Iterator[float]:
    """Per file of two runs 0 when it is the same to the byte, else the largest difference of its numbers."""
    newest = max(one.glob("checkpoints/step-*"))  # which earlier ones are kept depends on where a run was stopped
    for path in (newest / "model.safetensors", newest / "optim.safetensors", one / "val_losses.safetensors"):
        twin = other / path.relative_to(one)
        if not twin.exists():
            raise EquipoiseError(f"{path.relative_to(one)}: not written by the resumed run")
        if describe_file(path) != describe_file(twin):
            tensors, theirs = load_file(path), load_file(twin)
            worst = _worst([float((theirs[n].double() - t.double()).abs().max()) for n, t in tensors.items()])
            if not worst:
                raise EquipoiseError(f"{path.name}: the same numbers in other bytes")
            yield worst
    for name in ("metrics.jsonl", "samples.jsonl"):
        if masked(read_rows(one / name)) != masked(read_rows(other / name)):
            raise EquipoiseError(f"{name}: the resumed run wrote other rows")


def _fused_plain(device: torch.device) -> float:
    if device.type != "cpu":
        raise Skipped("the fused kernels are for a CPU")
    return _devices(device, device, ("fused", "plain"))


def _gpu_cpu(device: torch.device) -> float:
    if device.type == "cpu":
        seen = torch.cuda.is_available()
        raise Skipped("--device cpu was asked for" if seen else "no CUDA device is visible to torch")
    return _devices(device, torch.device("cpu"))


def _devices(
    device: torch.device, other: torch.device, kernels: tuple[Kernels | None, Kernels | None] = (None, None)
) -> float:
    apart = []
    for ffn in (DENSE, TOP_2):
        models = [_model(ffn, *way) for way in zip((device, other), kernels, strict=True)]
        logits = [_logits(model, _tokens(where)[0]).cpu() for model, where in zip(models, (device, other), strict=True)]
        gradients = [torch.cat([g.flatten().cpu() for g in _lm_gradients(model).values()]) for model in models]
        apart += [_apart(*logits), _apart(*gradients)]
    return _worst(apart)


def _worst(values: list[float]) -> float:
    """The largest, NaN when one is (which `max` may pass over); 0 of none."""
    return math.nan if any(math.isnan(value) for value in values) else max(values, default=0.0)


# ------------------------------------------------------------------------------------------------ all of them

CHECKS: Final[tuple[tuple[str, str, float, Callable[[torch.device], float]], ...]] = (
    ("one-expert", "one expert against the dense model: logits, gradients", 1e-5, _one_expert),
    ("identical-experts", "top 2 of 5 equal experts against the dense model: logits, gradients", 2e-5, _identical),
    ("all-experts", "top 5 of 5 against the softmax-weighted sum of all: output, gradients", 1e-5, _all),
    ("expert-order", "experts renumbered against before: logits, router losses", 1e-5, _expert_order),
    ("router-gradient", "language-model loss on each router (top 2, top 1): gradient", 1e-6, _router_gradient),
    (
        "balance-linear",
        "gradient that balance.coef adds against coef x the loss's own",
        1e-4,
        partial(_linear, "balance"),
    ),
    ("z-linear", "gradient that z_coef adds against coef x the loss's own", 1e-4, partial(_linear, "z")),
    ("micro-batches", "2 or 4 sequences at a time against all 8: losses, gradients", 1e-5, _micro_batches),
    ("causal-dense", "dense: logits before a changed token against before", 1e-5, partial(_causal, "dense")),
    (
        "causal-moe",
        "routed (top 2, top 1): logits before a changed token against before",
        1e-5,
        partial(_causal, "moe"),
    ),
    ("fused-plain", "fused kernels against plain ones (dense, top 2): logits, gradients", 5e-5, _fused_plain),
    ("resume", "a run stopped and resumed against one without a stop: every byte", 0.0, _resume),
    ("gpu-cpu", "GPU against CPU (dense, top 2): logits, gradients", 1e-4, _gpu_cpu),
    *GPU_CHECKS,
)
"""Name, what is compared, tolerance, and the function that measures. float32 rounds at 6e-8; what was measured on a CPU
lies 10 times or more below each tolerance, and what a fault moves a thousand times above."""
MUST_EXCEED: Final = ("router-gradient",)
"""The checks of something that may not vanish."""


def run_checks(device: Literal["auto", "cpu", "cuda"] = "auto") -> tuple[Compute, list[Check]]:
    """What was computed with, and every check in order; one that fails stops none of the others.

    In float32, as weights are; the run that is resumed in the dtype that training takes. Raises ConfigError for a
    device that is not there.
    """
    compute = choose_compute(device, "float32")
    torch.set_num_threads(1)  # tensors this small are slower with more, on a busy machine very much so
    return compute, [_check(*row, compute.device) for row in CHECKS]


def _check(
    name: str, compared: str, tolerance: float, measure: Callable[[torch.device], float], device: torch.device
) -> Check:
    """The check with its outcome; an error on the way (of torch or a driver, say) is a failure that says so."""
    value, note, above = math.nan, "", name in MUST_EXCEED
    status: Literal["ok", "failed", "skipped"] = "failed"
    try:
        value = measure(device)
        note = "" if math.isfinite(value) else "no finite number"
        status = "ok" if not note and (value > tolerance if above else value <= tolerance) else "failed"
    except Skipped as reason:
        status, note = "skipped", str(reason)
    except (EquipoiseError, RuntimeError) as error:
        note = str(error).partition("\n")[0]
    return Check(
        name=name,
        compared=compared,
        difference=value if math.isfinite(value) else None,
        tolerance=tolerance,
        above=above,
        status=status,
        note=note,
    )
