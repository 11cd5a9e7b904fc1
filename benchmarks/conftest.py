"""Benchmarks run one after the other in this process."""

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return 0
