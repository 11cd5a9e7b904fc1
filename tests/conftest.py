"""What every test shares: reproducible examples, and skips that say why."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import gradwire as gw
from gradwire import _core
from gradwire.arrays import cuda_problem

from .cuda_arrays import EMULATED_MODULE, is_emulated

try:
    from hypothesis import settings
except (
    ImportError
):  # as on a GPU machine without a network, where only the tests that need the GPU are run
    pass
else:
    # The same examples in every run and on every machine: running the test again repeats a failure. No deadline,
    # because a shared machine may stall. `pytest --hypothesis-profile thorough` tries more examples.
    settings.register_profile("gradwire", deadline=None, derandomize=True)
    settings.register_profile("thorough", settings.get_profile("gradwire"), max_examples=1_000)
    settings.load_profile("gradwire")


if is_emulated():
    from .emulated_cuda.device import install

    install(Path(os.environ[EMULATED_MODULE]), int(os.environ.get("GRADWIRE_EMULATED_SEED", 0)))

    @pytest.fixture(autouse=True)
    def collect_garbage() -> Iterator[None]:
        """Free what a test has left; nothing is collected while it runs."""
        yield
        gc.collect()


# The tests run in as many processes as there are processors. More threads would wait for each other, which makes the
# whole suite a third longer. The processes that pytest and the tests start read it.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(params=_core.usable_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set of this machine in turn."""
    before = _core.isa()
    _core.select_isa(request.param)
    yield request.param
    _core.select_isa(before)


@pytest.fixture
def nodes() -> Iterator[list[gw.Node]]:
    """Three nodes on loopback, each knowing those before it."""
    secret = bytes(range(32))
    with ExitStack() as stack:
        nodes: list[gw.Node] = []
        for _ in range(3):
            known = [node.address for node in nodes]
            nodes.append(stack.enter_context(gw.Node("127.0.0.1:0", known, secret=secret)))
        yield nodes


def pytest_report_header() -> str:
    return f"gradwire: backends {', '.join(gw.backends())}; hypothesis examples are derandomised"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Start worker processes for the whole suite only: named files start sooner without, and can be debugged.

    One more than there are processors: many tests wait for other processes, links or timers.
    """
    is_whole = config.args_source is not pytest.Config.ArgsSource.ARGS
    return (os.cpu_count() or 1) + 1 if is_whole else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {}
    for framework in ("jax", "torch"):
        if importlib.util.find_spec(framework) is None:
            missing[framework] = f"{framework} is not installed"
    if importlib.util.find_spec("pyspark") is None:
        missing["spark"] = "pyspark is not installed"
    elif shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        missing["spark"] = "Spark needs Java, and there is none"
    if "cuda" not in gw.backends():
        missing["cuda"] = f"no usable CUDA backend: {cuda_problem()}"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
