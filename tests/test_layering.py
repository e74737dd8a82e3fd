"""The layout holds: imports only point upwards in LAYOUT, torch stays where it belongs, and some calls never occur.

The table is the one of docs/design.md; a test keeps the two equal. Each rule is also shown to catch a breach.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "equipoise"
MAX_LINES = 400

# Read downwards: a file imports only from lines above its own; files of one line may import each other, but not in a
# circle. The longest entry that fits a file is its line. Second column: may the file load torch?
LAYOUT: dict[str, bool] = {
    "errors.py": False,
    "faults.py": False,
    "config.py": False,
    "files.py": False,
    "shapes.py": False,
    "text.py": False,
    "rng.py": False,
    "machine.py": False,
    "spec/": False,
    "schedule.py": False,
    "data/corpora/": False,
    "data/": False,
    "fetch/": False,
    "accounting.py": False,
    "micro.py": False,
    "hardware.py": False,
    "footprint.py": False,
    "matching.py": False,
    "budgets.py": False,
    "device.py": True,
    "parallel.py": True,
    "model/layers.py": True,
    "model/fused/": True,
    "model/grouped.py": True,
    "model/moe.py": True,
    "model/transformer.py": True,
    "optim.py": True,
    "checkpoint.py": True,
    "routing.py": False,
    "specialisation.py": False,
    "record.py": False,
    "explored.py": False,
    "weights.py": False,
    "trackers.py": False,
    "tracking.py": False,
    "trunk.py": False,
    "branch.py": True,
    "score.py": True,
    "explore.py": True,
    "nonfinite.py": True,
    "step.py": True,
    "compiled.py": True,
    "followers.py": True,
    "session.py": True,
    "finish.py": True,
    "train.py": True,
    "lock.py": False,
    "estimate.py": False,
    "study.py": False,
    "costs.py": False,
    "forks.py": False,
    "probe.py": False,
    "sizing.py": False,
    "engine.py": False,
    "work.py": False,
    "watching.py": False,
    "shares.py": False,
    "engines/": False,
    "execute.py": False,
    "step_time.py": False,
    "archive.py": False,
    "stats.py": False,
    "sampling.py": False,
    "crossover.py": False,
    "measures.py": False,
    "reasons.py": False,
    "verdict.py": False,
    "contracts.py": False,
    "evidence.py": False,
    "environments.py": False,
    "fairness.py": False,
    "sweeps.py": False,
    "comparisons.py": False,
    "results.py": False,
    "loading.py": False,
    "compare.py": False,
    "power.py": False,
    "figures/": False,
    "report/": False,
    "export/": False,
    "parity.py": True,
    "selftest.py": True,
    "bench.py": True,
    "cli/": False,
    "__main__.py": False,
}
# A command may load torch, but only once it runs: it imports inside its handlers.
LAZY = ("cli/",)
# Reading the environment is for the command line, and for what a scheduler started, which has none above it.
READS_ENVIRONMENT = ("cli/", "engines/worker.py")
# Who may load matplotlib when it is imported.
DRAWS = ("figures/", *(f"report/{name}.py" for name in ("curves", "explorer", "page", "publish", "svg", "write")))

FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
TREES = {file: ast.parse((PACKAGE / file).read_text(encoding="utf-8")) for file in FILES}


def line_of(file: str) -> int:
    """Position of a file's line in LAYOUT; the package's own __init__ stands above all (-1), a stranger fails."""
    if file == "__init__.py":
        return -1
    fitting = [entry for entry in LAYOUT if file == entry or (entry.endswith("/") and file.startswith(entry))]
    if not fitting and file.endswith("/__init__.py"):  # of a folder whose files have lines of their own: the first one
        fitting = [entry for entry in LAYOUT if entry.startswith(file.removesuffix("__init__.py"))][:1]
    assert fitting, f"{file} has no line in LAYOUT (tests/test_layering.py) and docs/design.md"
    return list(LAYOUT).index(max(fitting, key=len))


def may_load_torch(file: str) -> bool:
    return file != "__init__.py" and list(LAYOUT.values())[line_of(file)]


def module_name(file: str) -> str:
    return ".".join(["equipoise", *Path(file).with_suffix("").parts]).removesuffix(".__init__")


def imports(tree: ast.AST, files: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Every import anywhere in a file: (file of the package, or outside module), line number."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield files.get(alias.name, alias.name), node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write the whole name"
            for alias in node.names:
                yield (
                    files.get(f"{node.module}.{alias.name}") or files.get(str(node.module), str(node.module)),
                    node.lineno,
                )


MODULES = {module_name(file): file for file in FILES}
EDGES = {file: list(imports(tree, MODULES)) for file, tree in TREES.items()}
# The package's own file offers one function of a line below, and imports it when it is called: a test sees to that.
EDGES["__init__.py"] = []


def test_every_import_points_upwards() -> None:
    wrong = [
        f"{file}:{number} imports {target}, which is not above it"
        for file, edges in EDGES.items()
        for target, number in edges
        if target in TREES and line_of(target) > line_of(file)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_circle_of_imports() -> None:
    done: set[str] = set()

    def visit(file: str, path: tuple[str, ...]) -> None:
        assert file not in path, " → ".join([*path, file])
        if file not in done:
            for target, _ in EDGES[file]:
                if target in TREES and target != file:
                    visit(target, (*path, file))
            done.add(file)

    for file in FILES:
        visit(file, ())


def test_only_the_named_lines_import_torch() -> None:
    """Also not inside a function, and not by way of another file of ours, except where commands run."""
    wrong = [
        f"{file}:{number} imports {target}"
        for file, edges in EDGES.items()
        if not may_load_torch(file) and not file.startswith(LAZY)
        for target, number in edges
        if target.split(".")[0] == "torch"
        or target == "safetensors.torch"
        or (target in TREES and may_load_torch(target))
    ]
    assert not wrong, "\n".join(wrong)


def test_design_shows_this_layout() -> None:
    """docs/design.md lists the same lines in the same order with the same torch column; planned ones do not exist."""
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    block = text.split("```")[1]
    shown: dict[str, bool] = {}
    for row in block.splitlines():
        found = re.match(r"  (?P<names>[\w./*]+(?:, [\w./]+)*) +(?P<torch>yes|no)\*? +(?P<what>.+)", row)
        for name in found["names"].split(", ") if found else ():
            planned = found is not None and found["what"].startswith("(planned)")
            assert planned != (PACKAGE / name).exists(), (
                f"docs/design.md: {name} {'exists' if planned else 'is missing'}"
            )
            if not planned:
                shown[name] = found is not None and found["torch"] == "yes"
    assert list(shown.items()) == list(LAYOUT.items())


@pytest.mark.parametrize("file", FILES)
def test_files_stay_short(file: str) -> None:
    num_lines = len((PACKAGE / file).read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_LINES, f"{file} has {num_lines} lines; split it by noun or verb"


def loaded_after_importing(files: list[str]) -> set[str]:
    """Top-level modules in a fresh process that imported these files of the package and nothing else."""
    code = (
        f"import importlib, sys\nfor name in {[module_name(file) for file in files]}: importlib.import_module(name)\n"
    )
    code += "print(*sorted({name.split('.')[0] for name in sys.modules}))"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_what_surrounds_training_loads_no_torch() -> None:
    light = [file for file in FILES if not may_load_torch(file)]
    assert "torch" not in loaded_after_importing(light)
    undrawn = loaded_after_importing([file for file in light if not file.startswith(DRAWS)])
    assert not {"matplotlib", "jinja2", "transformers", "tensorboard", "wandb"} & undrawn


def test_the_package_itself_loads_nothing() -> None:
    assert not {"torch", "numpy", "pydantic", "scipy", "matplotlib"} & loaded_after_importing(["__init__.py"])


def test_a_fresh_process_would_notice_torch() -> None:
    assert "torch" in loaded_after_importing(["optim.py"])


# ----------------------------------------------------------------------------------------------- what never occurs

BANNED_IMPORTS = ("pickle", "dill", "shelve", "marshal", "random", "matplotlib.pyplot", "pylab")
GLOBAL_RANDOM = re.compile(
    r"(np|numpy)\.random\.(?!Generator$|Philox$|SeedSequence$)\w+|torch\.(manual_)?seed|torch\.cuda\.manual_seed\w*"
)


def breaches(tree: ast.AST, *, reads_environment: bool = False) -> Iterator[tuple[int, str]]:
    """(line number, rule) for everything in a file that Equipoise never does."""
    for target, number in imports(tree, {}):
        if target in BANNED_IMPORTS or target.startswith(tuple(f"{name}." for name in BANNED_IMPORTS)):
            yield number, f"imports {target}"
    known = aliases(tree)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "matplotlib"
            and any(a.name == "pyplot" for a in node.names)
        ):
            yield node.lineno, "imports matplotlib.pyplot"
        if isinstance(node, ast.ImportFrom) and node.module == "os" and not reads_environment:
            yield from ((node.lineno, "reads the environment") for a in node.names if a.name in ("environ", "getenv"))
        if isinstance(node, ast.Attribute):
            name = whole_name(node, known)
            if name in ("os.environ", "os.getenv") and not reads_environment:
                yield node.lineno, "reads the environment"
            if GLOBAL_RANDOM.fullmatch(name):
                yield node.lineno, f"{name}: a global random state"
        if isinstance(node, ast.Name) and GLOBAL_RANDOM.fullmatch(name := whole_name(node, known)):
            yield node.lineno, f"{name}: a global random state"
    yield from calls_that_never_occur(tree)


def aliases(tree: ast.AST) -> dict[str, str]:
    """What the names that a file imports stand for: {"np": "numpy", "read": "torch.load"}."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return known


def whole_name(node: ast.expr, known: dict[str, str]) -> str:
    """A name with dots as written, its first part replaced by what it stands for."""
    first, dot, rest = ast.unparse(node).partition(".")
    return known.get(first, first) + dot + rest


def calls_that_never_occur(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line number, rule) for calls that no file of the project makes, its tests included."""
    known = aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from ((node.lineno, rule) for rule in call_breaches(node, whole_name(node.func, known)))


NO_TEXT = ("os.open", "browser.open", "opener.open")
"""Calls named open that open no text."""


def call_breaches(call: ast.Call, name: str) -> Iterator[str]:
    method = name.rsplit(".", 1)[-1]
    given = {keyword.arg: keyword.value for keyword in call.keywords}

    def is_set(argument: str, value: object) -> bool:
        return isinstance(node := given.get(argument), ast.Constant) and node.value is value

    if name.removeprefix("builtins.") in ("eval", "exec", "os.system", "os.popen", "yaml.load"):
        yield f"calls {name}"
    if name == "torch.load" and not is_set("weights_only", True):
        yield "torch.load without weights_only=True"
    if name in ("np.load", "numpy.load") and not is_set("allow_pickle", False):
        yield "np.load without allow_pickle=False"
    if "shell" in given and not is_set("shell", False):
        yield "a shell"
    for words in ("text", "universal_newlines"):
        if is_set(words, True) and "encoding" not in given:
            yield f"{words}=True without encoding"
    if name in ("subprocess.getoutput", "subprocess.getstatusoutput"):
        yield "a shell"
    if method in ("read_text", "write_text") and "encoding" not in given:
        yield f"{method} without encoding"
    if (name == "open" or method in ("open", "fdopen")) and name not in NO_TEXT and "encoding" not in given:
        modes = [arg.value for arg in [*call.args, *given.values()] if isinstance(arg, ast.Constant)]
        if not any(isinstance(mode, str) and re.fullmatch(r"[rwxa]?b\+?|[rwxa]\+?b", mode) for mode in modes):
            yield f"{name} without encoding"


@pytest.mark.parametrize("file", FILES)
def test_nothing_banned_occurs(file: str) -> None:
    found = list(breaches(TREES[file], reads_environment=file.startswith(READS_ENVIRONMENT)))
    assert not found, "\n".join(f"{file}:{number}: {rule}" for number, rule in found)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import random",
        "import matplotlib.pyplot as plt",
        "from matplotlib import pyplot",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "exec(text)",
        "yaml.load(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "subprocess.run(command, text=True)",
        "open(path)",
        "open(path, 'w')",
        "path.open()",
        "path.open('w', newline='')",
        "path.read_text()",
        "path.write_text(text)",
        "os.environ['HOME']",
        "os.getenv('HOME')",
        "from os import environ",
        "np.random.seed(0)",
        "np.random.default_rng()",
        "torch.manual_seed(0)",
        "from torch import load\nload(path)",
        "from torch import load as read\nread(path, weights_only=False)",
        "import torch as t\nt.load(path)",
        "from numpy import load\nload(path)",
        "import numpy as n\nn.load(path, allow_pickle=True)",
        "from os import system\nsystem(text)",
        "from os import popen as p\np(text)",
        "import builtins\nbuiltins.eval(text)",
        "from builtins import exec as run\nrun(text)",
        "from yaml import load\nload(text)",
        "import os as o\no.environ",
        "import numpy as n\nn.random.seed(0)",
        "from numpy.random import default_rng\ndefault_rng()",
        "from torch import manual_seed\nmanual_seed(0)",
        "subprocess.run(command, universal_newlines=True)",
        "from subprocess import getoutput\ngetoutput(text)",
    ],
)
def test_each_ban_can_fail(code: str) -> None:
    assert list(breaches(ast.parse(code)))


OTHERS = sorted(path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_tests_and_benchmarks_make_no_such_call_either(path: Path) -> None:
    """They may import pickle and seed what they draw; and three run the code that a model card or a page shows."""
    found = [
        (number, rule)
        for number, rule in calls_that_never_occur(ast.parse(path.read_text(encoding="utf-8")))
        if rule != "calls exec" or path.name not in ("test_write.py", "test_files.py", "test_readme.py")
    ]
    assert not found, "\n".join(f"{path}:{number}: {rule}" for number, rule in found)


@pytest.mark.parametrize(
    "code",
    [
        "model.eval()",
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=False)",
        "subprocess.run(command, text=True, encoding='utf-8')",
        "open(path, 'rb')",
        "open(path, encoding='utf-8')",
        "path.open('xb')",
        "path.open(mode='r+b')",
        "os.open(path, flags)",
        "path.read_text(encoding='utf-8')",
        "path.read_bytes()",
        "np.random.Generator(np.random.Philox(key=key))",
        "import matplotlib.figure",
        "from safetensors.torch import load\nload(content)",
        "from tomllib import load\nload(file)",
    ],
)
def test_what_is_meant_is_allowed(code: str) -> None:
    assert not list(breaches(ast.parse(code)))


def test_the_command_line_may_read_the_environment() -> None:
    assert not list(breaches(ast.parse("os.environ.get('NO_COLOR')"), reads_environment=True))
