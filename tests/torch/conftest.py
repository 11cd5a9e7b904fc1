"""Processes shared by the tests of the hook."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from .ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Yield two ranks; a test that breaks their process group must make its own."""
    with TemporaryDirectory() as folder:
        ranks = Ranks(2, Path(folder))
        yield ranks
        ranks.close()
