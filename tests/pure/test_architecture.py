"""The shape of src/hsdp: who may import whom, how long things may get, and what an import must not do.

    L6  cli, train, ...            a module may import from the levels below its own,
    L5  clip, checkpoint, ...      and within its level from the modules listed before it
    ...
    L0  tensors, layout, ...

A check is a function from parsed source to a list of complaints, so each is also tried on a bad example here.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "hsdp"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# Lowest first. Within a level the order counts too: a module may import those written before it. "__init__" is the
# package itself: everything up to it is the engine, which knows no device by name and keeps no global state.
LEVELS: dict[str, tuple[str, ...]] = {
    "L0": ("tensors", "device", "layout", "precision", "control", "dtensors", "internals", "outdated"),
    "L1": ("placement", "draw", "topology", "mesh", "diagnosis", "pending", "collectives", "param"),
    "L2": ("segment", "unit", "gradients", "buffers", "ignored"),
    "L3": ("monitor", "waits", "reductions", "calls", "schedule", "hooks"),
    "L4": ("units", "materialize", "module", "copying", "wrap", "replicas", "accumulate", "describe", "target", "api"),
    "L5": ("clip", "loss", "checkpoint"),
    "package": ("__init__",),
    "L6": (
        *("integrations", "data", "model", "options", "progress", "runs"),
        *("train", "worker", "launch", "commands", "cli", "__main__"),
    ),
}
HEIGHT = {name: height for height, name in enumerate(name for level in LEVELS.values() for name in level)}
LEVEL_OF = {name: level for level, names in LEVELS.items() for name in names}
# What only the extras install: the engine is torch alone.
EXTRAS = (
    *("matplotlib", "numpy", "psutil", "rich", "typer"),
    *("accelerate", "lightning", "lightning_fabric", "peft", "pytorch_lightning", "safetensors", "transformers"),
)


@dataclass(frozen=True)
class Source:
    path: str  # below src/hsdp, as it appears in a complaint
    text: str

    @property
    def module(self) -> str:
        """The name in LEVELS; a sub-package such as integrations counts as one module."""
        return Path(self.path).parts[0].removesuffix(".py")

    @property
    def is_engine(self) -> bool:
        return HEIGHT.get(self.module, len(HEIGHT)) <= HEIGHT["__init__"]

    @property
    def nodes(self) -> Iterator[ast.AST]:
        return ast.walk(ast.parse(self.text, self.path))


def read_package() -> list[Source]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return [Source(path.relative_to(PACKAGE).as_posix(), path.read_bytes().decode()) for path in paths]


# ---------------------------------------------------------------------------------------------------------- checks


def check_listed(source: Source) -> list[str]:
    if source.module in LEVEL_OF:
        return []
    return [f"{source.path}: no level for {source.module!r}; add it to LEVELS in tests/pure/test_architecture.py"]


def imported_modules(source: Source) -> Iterator[tuple[int, str]]:
    """(line, name in LEVELS) of all that is imported from hsdp, inside functions and `if TYPE_CHECKING` as well."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # from hsdp import x: a module where there is one, else something of the package itself
            base = _absolute(source, node)
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "hsdp" else [base]
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            if first == "hsdp":
                module = rest.partition(".")[0]
                yield node.lineno, module if module in HEIGHT or _is_module(module) else "__init__"


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    package = ["hsdp", *Path(source.path).parts[:-1]]
    package = package[: len(package) - (node.level - 1)]
    return ".".join([*package, *([node.module] if node.module else [])])


def _is_module(name: str) -> bool:
    return bool(name) and ((PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir())


def check_imports(source: Source) -> list[str]:
    complaints = []
    own = source.module
    for line, target in imported_modules(source):
        inside_subpackage = target == own and "/" in source.path
        if own in HEIGHT and HEIGHT.get(target, len(HEIGHT)) >= HEIGHT[own] and not inside_subpackage:
            where = f"{source.path}:{line}"
            complaints.append(f"{where}: {own} ({LEVEL_OF[own]}) imports {target} ({LEVEL_OF.get(target, 'unlisted')})")
    return complaints


def check_lengths(source: Source) -> list[str]:
    complaints = []
    num_lines = len(source.text.splitlines())
    if num_lines > MAX_FILE_LINES:
        complaints.append(f"{source.path}: {num_lines} lines, at most {MAX_FILE_LINES}")
    for node in source.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                where = f"{source.path}:{node.lineno}"
                complaints.append(f"{where}: {node.name} has {num_lines} lines, at most {MAX_FUNCTION_LINES}")
    return complaints


def check_ascii(source: Source) -> list[str]:
    lines = enumerate(source.text.splitlines(), 1)
    return [f"{source.path}:{number}: not ASCII: {line.strip()!a}" for number, line in lines if not line.isascii()]


def check_devices(source: Source) -> list[str]:
    """The engine has one path for every device. Comments and docstrings may speak of one, code may not."""
    if not source.is_engine:
        return []
    tree = ast.parse(source.text, source.path)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    complaints = []
    for node in ast.walk(tree):
        word = "" if id(node) in docstrings else _word(node)
        if "cuda" in word.lower():
            complaints.append(f"{source.path}:{getattr(node, 'lineno', '?')}: the engine names a device: {word!r}")
    return complaints


def _word(node: ast.AST) -> str:
    """The name or the text that stands in `node` itself."""
    for field_name in ("id", "attr", "name", "module", "value", "arg"):
        word = getattr(node, field_name, None)
        if isinstance(word, str):
            return word
    return ""


def check_state(source: Source) -> list[str]:
    """No `global`, and nothing is written into a module that was imported: no monkey-patching, no settings."""
    if not source.is_engine:
        return []
    imported = set()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            imported |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    complaints = []
    for node in source.nodes:
        if isinstance(node, ast.Global):
            complaints.append(f"{source.path}:{node.lineno}: global {', '.join(node.names)}")
        for target in _assigned(node):
            if isinstance(target, (ast.Attribute, ast.Subscript)) and _root(target) in imported:
                complaints.append(f"{source.path}:{target.lineno}: writes into a module: {ast.unparse(target)}")
    return complaints


def _assigned(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.Assign, ast.Delete)):
        return node.targets
    return [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else []


def _root(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


CHECKS = [
    check_listed,
    check_imports,
    check_lengths,
    check_ascii,
    check_devices,
    check_state,
]


@pytest.mark.parametrize("check", CHECKS)
def test_package(check: Callable[[Source], list[str]]) -> None:
    sources = read_package()
    assert sources, f"nothing to check in {PACKAGE}"
    complaints = [complaint for source in sources for complaint in check(source)]
    assert not complaints, "\n" + "\n".join(complaints)


# ------------------------------------------------------------------------------------------- the checks themselves


LONG_FUNCTION = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
BAD: list[tuple[Callable[[Source], list[str]], str, str, str]] = [
    (check_listed, "extra.py", "", "extra.py: no level for 'extra'; add it to LEVELS in "),
    (check_imports, "layout.py", "import hsdp.unit", "layout.py:1: layout (L0) imports unit (L2)"),
    (check_imports, "unit.py", "\nfrom hsdp.clip import x", "unit.py:2: unit (L2) imports clip (L5)"),
    (check_imports, "unit.py", "from hsdp import schedule", "unit.py:1: unit (L2) imports schedule (L3)"),
    (check_imports, "unit.py", "from hsdp import Precision", "unit.py:1: unit (L2) imports __init__"),
    (check_imports, "unit.py", "from .hooks import x", "unit.py:1: unit (L2) imports hooks (L3)"),
    (check_imports, "unit.py", "from . import hooks", "unit.py:1: unit (L2) imports hooks (L3)"),
    (check_imports, "unit.py", "from hsdp.extra import x", "unit.py:1: unit (L2) imports __init__"),
    (check_imports, "schedule.py", "import hsdp.hooks", "schedule.py:1: schedule (L3) imports hooks (L3)"),
    (check_imports, "unit.py", "import hsdp.unit", "unit.py:1: unit (L2) imports unit (L2)"),
    (check_imports, "clip.py", "def f():\n    import hsdp.cli", "clip.py:2: clip (L5) imports cli (L6)"),
    (check_imports, "clip.py", "if TYPE_CHECKING:\n    from hsdp.cli import x", "clip.py:2: clip (L5) imports cli"),
    (check_imports, "integrations/a.py", "from ..cli import x", "integrations/a.py:1: integrations (L6) imports"),
    (check_lengths, "unit.py", "\n" * (MAX_FILE_LINES + 1), "unit.py: 401 lines, at most 400"),
    (check_lengths, "unit.py", LONG_FUNCTION, "unit.py:1: f has 61 lines, at most 60"),
    (check_ascii, "unit.py", "x = 1\n# caf\u00e9", "unit.py:2: not ASCII: '# caf\\xe9'"),
    (check_devices, "unit.py", "import torch\ntorch.cuda.x()", "unit.py:2: the engine names a device: 'cuda'"),
    (check_devices, "unit.py", "f(f'{x} cuda:0')", "unit.py:1: the engine names a device: ' cuda:0'"),
    (check_devices, "unit.py", "from torch.cuda import Stream", "unit.py:1: the engine names a device"),
    (check_state, "unit.py", "def f():\n    global x", "unit.py:2: global x"),
    (check_state, "unit.py", "import torch as t\nt.a.b = 1", "unit.py:2: writes into a module: t.a.b"),
    (check_state, "unit.py", "import os\nos.environ['A'] = ''", "unit.py:2: writes into a module: os.environ"),
]
GOOD: list[tuple[Callable[[Source], list[str]], str, str]] = [
    (check_imports, "unit.py", "import torch\nimport hsdp.layout\nfrom hsdp import segment\nfrom . import device"),
    (check_imports, "cli.py", "import hsdp\nfrom hsdp import Precision\nfrom hsdp.train import run"),
    (check_imports, "integrations/a.py", "from hsdp.integrations.b import x\nfrom . import c\nfrom ..clip import d"),
    (check_lengths, "unit.py", "\n" * MAX_FILE_LINES),
    (check_lengths, "unit.py", LONG_FUNCTION.removesuffix("    pass\n")),
    (check_devices, "unit.py", '"""cuda"""\n# cuda\ndef f():\n    "cuda, too"\n'),
    (check_devices, "train.py", "device = 'cuda'"),
    (check_state, "unit.py", "import torch\nx = torch.zeros(1)\nx[0] = 1\nself.y = torch.z"),
]


@pytest.mark.parametrize(("check", "path", "text", "complaint"), BAD)
def test_check_finds(check: Callable[[Source], list[str]], path: str, text: str, complaint: str) -> None:
    complaints = check(Source(path, text))
    assert len(complaints) == 1
    assert complaints[0].startswith(complaint)


@pytest.mark.parametrize(("check", "path", "text"), GOOD)
def test_check_lets_pass(check: Callable[[Source], list[str]], path: str, text: str) -> None:
    assert check(Source(path, text)) == []


# -------------------------------------------------------------------------------------------------- what imports do


PROBE = """
import json, logging, os, signal, sys, threading, warnings
import torch, torch.distributed

def state():
    return {
        "environment": sorted(os.environ.items()),
        "process group": torch.distributed.is_initialized(),
        "default dtype": str(torch.get_default_dtype()),
        "torch threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
        "threads": threading.active_count(),
        "log handlers": [str(handler) for handler in logging.getLogger().handlers],
        "SIGINT": str(signal.getsignal(signal.SIGINT)),
        "hooks": [str(sys.excepthook), str(sys.unraisablehook), str(threading.excepthook)],
        "folder": os.getcwd(),
    }

loaded, before = set(sys.modules), state()
PROBED
after = state()
changed = [name for name in before if before[name] != after[name]]
print(json.dumps({"changed": changed, "loaded": sorted(set(sys.modules) - loaded)}))
"""


def probe_import(statement: str) -> tuple[list[str], set[str]]:
    """(what else changed, the top-level modules loaded) by `statement` in a new interpreter that has torch loaded."""
    command = [sys.executable, "-c", PROBE.replace("PROBED", statement)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()  # an import prints nothing
    result = json.loads(line)
    return result["changed"], {name.partition(".")[0] for name in result["loaded"]}


def test_import_of_the_package_has_no_side_effects() -> None:
    changed, loaded = probe_import("import hsdp")
    assert changed == []
    assert "hsdp" in loaded
    assert loaded.isdisjoint(EXTRAS)


def test_probe_sees_side_effects() -> None:
    changed, loaded = probe_import("os.environ['A'] = '1'; torch.set_default_dtype(torch.float64); import psutil")
    assert changed == ["environment", "default dtype"]
    assert "psutil" in loaded
