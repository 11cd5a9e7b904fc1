"""The all-gather of bytes of different lengths, in one collective or two."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402

from gradwire.torch.gather import Gather  # noqa: E402

from .ranks import RankFailed, Ranks  # noqa: E402

pytestmark = pytest.mark.torch

# Payload bytes of rank 0 and rank 1 in each step.
LENGTHS = [(0, 0), (5_000, 7), (7, 5_100), (100_000, 99_999), (0, 3), (90_000, 1), (1, 64)]


def payload(rank: int, step: int) -> bytes:
    return bytes((rank + 3 * step + place) % 251 for place in range(LENGTHS[step][rank]))


def gather_all(rank: int) -> Any:
    gather = Gather(dist.group.WORLD, torch.device("cpu"))
    answers = []
    for step in range(len(LENGTHS)):
        found = gather(step, 0, memoryview(payload(rank, step)), step == 3 and rank == 1)
        answers.append([(bytes(one.payload), one.is_nonfinite) for one in found])
    return answers, gather.second_collectives


def test_every_rank_gets_all_payloads_in_the_order_of_the_ranks(two_ranks: Ranks) -> None:
    for answers, second_collectives in two_ranks.run(gather_all):
        for step, found in enumerate(answers):
            expected = [(payload(rank, step), step == 3 and rank == 1) for rank in (0, 1)]
            assert found == expected
        assert 0 < second_collectives < len(LENGTHS)


def differ(rank: int) -> None:
    Gather(dist.group.WORLD, torch.device("cpu"))(3, rank, memoryview(b""), False)


def test_ranks_at_different_buckets_raise(two_ranks: Ranks) -> None:
    with pytest.raises(
        RankFailed, match="rank 1 sent bucket 1 of step 3, this rank is at bucket 0"
    ):
        two_ranks.run(differ)
