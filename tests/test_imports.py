"""Which module may import which, and what ``import gradwire`` loads."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire

from .import_graph import PACKAGE, SOURCES, imported_modules, imports_of

COMPILED = {"_core", "_cuda"}
CODEC = COMPILED | {
    "arrays",
    "codec",
    "cuda",
    "dl4j",
    "errors",
    "message",
    "partition",
    "policy",
    "reference",
    "state",
}
INTERFACE = "gradwire"

# What each part may import: a part is a module or a package directly below gradwire. Only the thin parts on top may
# import the public interface itself.
ALLOWED = {
    "errors": set(),
    "clock": set(),
    "rendezvous": set(),
    "policy": {"errors"},
    "state": {"policy"},
    "arrays": COMPILED | {"errors"},
    "partition": {"state"},
    "shares": {"errors"},
    "slices": {"errors", "transport"},
    "ulps": {"arrays"},
    "agreement": {"arrays"},
    "message": COMPILED | {"arrays", "errors", "partition", "state"},
    "codec": COMPILED | {"arrays", "errors", "message", "partition", "policy", "state"},
    "cuda": COMPILED | {"arrays", "codec", "partition", "policy", "state"},
    "reference": {"errors", "partition", "policy"},
    "dl4j": {"errors", "message", "policy"},
    "shared_memory": set(),
    "hosted": {"errors", "shared_memory", "state"},
    "coprocessor": CODEC | {"clock", "hosted", "shared_memory", "slices", "transport"},
    "cost": {"policy", "transport"},
    "calibration": CODEC | {"cost", "transport"},
    "transport": {"clock", "errors", "rendezvous", "transport"},
    "exchange": CODEC
    | {"agreement", "clock", "exchange", "shared_memory", "shares", "slices", "transport"},
    "feed": {"errors", "feed", "shared_memory", "state", "transport"},
    "cli": CODEC
    | {
        "calibration",
        "cli",
        "cost",
        "exchange",
        "rendezvous",
        "shared_memory",
        "slices",
        "torch",
        "transport",
    }
    | {INTERFACE},
    "sharing": CODEC | {"exchange", "rendezvous", "transport"},
    "jax": {"arrays", "errors", "exchange", "sharing", "state", "transport", "ulps"},
    "torch": CODEC | {"exchange", "rendezvous", "sharing", "torch", "transport", "ulps", INTERFACE},
    "hf": {"exchange", "sharing", "torch"},
    "lightning": {"exchange", "rendezvous", "sharing", "torch"},
    "ray": {"cli", "rendezvous"},
    "spark": CODEC | {"clock", "exchange", "feed", "spark", "torch", "transport", INTERFACE},
    "__init__": CODEC | {"coprocessor", "cost", "exchange", "hosted", "sharing", "transport"},
    "__main__": {"cli"},
}
FRAMEWORKS = {"cupy", "jax", "matplotlib", "pyspark", "ray", "sklearn", "torch"}
# Packages for a framework; nothing imports them before the user does.
FRAMEWORK_PACKAGES = {
    "torch": {"torch"},
    "feed": {"torch"},
    "hf": {"torch"},
    "ray": {"ray"},
    "spark": {"matplotlib", "pyspark", "torch"},
}
WITH_SOCKETS = {"rendezvous.py", "transport/addressing.py", "transport/driver.py"}
WITH_A_CLOCK = {
    "calibration.py",
    "clock.py",
    "coprocessor.py",
    "rendezvous.py",
    "feed/ring.py",
    "hosted.py",
    "shared_memory.py",
    "torch/comparison.py",
    "torch/hook.py",
    "transport/driver.py",
    "transport/node.py",
}


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def part_of(path: Path) -> str:
    return name(path).split("/")[0].removesuffix(".py")


def parts(modules: frozenset[str]) -> set[str]:
    """Return the parts of gradwire among ``modules``."""
    names = [module.split(".") for module in modules]
    own = [one for one in names if one[0] == INTERFACE]
    return {one[1] if len(one) > 1 else INTERFACE for one in own}


def test_every_form_of_import_is_seen() -> None:
    code = """
import numpy, gradwire
from gradwire import policy
from .. import dl4j
from ..exchange import Exchange
from . import crypto
def later():
    import gradwire.codec
    from .wire import Ack
"""
    assert set(imported_modules(code, "gradwire.transport")) == {
        "numpy",
        "gradwire",
        "gradwire.policy",
        "gradwire.dl4j",
        "gradwire.exchange",
        "gradwire.transport.crypto",
        "gradwire.codec",
        "gradwire.transport.wire",
    }


def test_every_import_points_down() -> None:
    wrong = {name(path): parts(imports_of(path)) - ALLOWED[part_of(path)] for path in SOURCES}
    assert {one: imports for one, imports in wrong.items() if imports} == {}


def test_frameworks_are_imported_only_inside_functions() -> None:
    wrong = {}
    for path in SOURCES:
        outside = [node for node in ast.parse(path.read_text()).body if is_import(node)]
        code = ast.unparse(ast.Module(body=outside, type_ignores=[]))
        imported = {module.split(".")[0] for module in imported_modules(code, "")}
        wrong[name(path)] = imported & (FRAMEWORKS - FRAMEWORK_PACKAGES.get(part_of(path), set()))
    assert {one: imports for one, imports in wrong.items() if imports} == {}


def is_import(node: ast.stmt) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0)


def test_sockets_and_the_clock_stay_in_their_files() -> None:
    library = [path for path in SOURCES if not name(path).startswith("cli/")]
    with_sockets = {name(path) for path in library if imports_of(path) & {"select", "socket"}}
    with_a_clock = {name(path) for path in library if "time" in imports_of(path)}
    assert with_sockets == WITH_SOCKETS
    assert with_a_clock == WITH_A_CLOCK


def run_python(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout


def test_importing_gradwire_brings_neither_cryptography_nor_frameworks() -> None:
    loaded = set(run_python("import gradwire, sys; print(*sys.modules)").split())
    unwanted = FRAMEWORKS | {"cryptography", "gradwire.transport", "gradwire.exchange"}
    assert "gradwire.codec" in loaded
    assert not loaded & unwanted


def test_the_codec_works_without_cryptography() -> None:
    code = """
import sys
sys.modules["cryptography"] = None
import numpy as np, gradwire as gw
print(gw.decode(gw.Encoder(2, threshold=1.0).encode(np.ones(2, np.float32))).tolist())
"""
    assert run_python(code) == "[1.0, 1.0]\n"


def test_importing_gradwire_loads_little_more_than_numpy() -> None:
    code = "import numpy, sys; before = set(sys.modules); import gradwire; print(*set(sys.modules) - before)"
    loaded = run_python(code).split()
    assert "gradwire" in loaded
    assert len(loaded) <= 30


def test_all_public_names_resolve_and_no_others_exist() -> None:
    packages = {"exchange", "feed", "jax", "reference", "spark", "torch", "transport"}
    assert set(dir(gradwire)) == {*gradwire.__all__, *packages}
    for public in gradwire.__all__:
        if public != "__version__":
            assert getattr(gradwire, public) is not None
    with pytest.raises(AttributeError, match=re.escape("no attribute 'Encodr'")):
        gradwire.Encodr  # noqa: B018


def last_error(code: str, *options: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 1, done.stderr
    return done.stderr.splitlines()[-1]


def test_parts_are_imported_when_they_are_used() -> None:
    lazy = ("coprocessor", "cost", "dl4j", "exchange", "feed", "reference", "spark", "transport")
    code = "import gradwire as gw, sys; loaded = set(sys.modules)\n"
    code += "".join(f"print('gradwire.{part}' in loaded, gw.{part}.__name__)\n" for part in lazy)
    assert run_python(code).splitlines() == [f"False gradwire.{part}" for part in lazy]


def test_without_torch_its_package_names_the_command_that_installs_it() -> None:
    hidden = (
        "import importlib.util as util; found = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'torch' else found(name, *rest)\n"
    )
    error = last_error(hidden + "import gradwire.torch")
    assert error.endswith('gradwire.torch needs PyTorch: pip install "gradwire[torch]"')


def test_without_its_compiled_core_gradwire_says_what_to_do(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "gradwire", ignore=shutil.ignore_patterns("*.so"))
    # Without `site`, an editable installation does not put its own gradwire before the copy.
    error = last_error(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import gradwire", "-S")
    assert "No module named 'gradwire._core'" in error
    assert "pip install ." in error
