"""Processes shared by the tests of the hook, nodes, and places where optimisers are shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import gradwire as gw
from gradwire import rendezvous

from .ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Yield two ranks; a test that breaks their process group must make its own."""
    with TemporaryDirectory() as folder:
        ranks = Ranks(2, Path(folder))
        yield ranks
        ranks.close()


@pytest.fixture
def pair() -> Iterator[list[gw.Node]]:
    """Yield two nodes that are to train together."""
    secret = bytes(range(32))
    with (
        gw.Node("127.0.0.1:0", secret=secret, node_id=1) as one,
        gw.Node("127.0.0.1:0", [one.address], secret=secret, node_id=2) as two,
    ):
        one.expected_peers = two.expected_peers = 1
        yield [one, two]


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the environment say nothing about a run."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", rendezvous.PEERS, rendezvous.MIN_PEERS):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Any]]]:
    """Yield a function that runs work(rank, share) alone, on two machines, or as a team of two workers."""
    from .places import run_everywhere

    yield from run_everywhere(monkeypatch)
