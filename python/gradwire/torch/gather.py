"""All-gather of byte strings of different lengths over a torch process group, usually with one collective."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..errors import MessageError

__all__ = ["Gather", "Gathered"]

# What precedes every payload: step, index, whether the sender met a non-finite value, length in bytes.
_HEADER = struct.Struct("<QI?3xQ")

# A slot fits a payload an eighth longer than the longest of the step before, and shrinks by at most a quarter per step,
# since lengths go up and down; anything longer costs a second collective. Slots begin small, because nothing is known
# about the first payloads.
_HEADROOM_DIVISOR = 8
_SHRINK_DIVISOR = 4
_SLOT_GRAIN_BYTES = 64
_FIRST_SLOT_BYTES = 1024


class Gathered(NamedTuple):
    """One rank's contribution: a read-only view of its bytes, and whether the rank met a non-finite value."""

    payload: memoryview
    is_nonfinite: bool


class Gather:
    """All-gather of one byte string per rank and bucket, in the order of the ranks.

    Every rank sends a slot of the same size: a header and as much of its payload as fits. All ranks see all lengths, so
    they agree on the size of the next slot, and on whether a second collective must bring the rest.

    Collectives run one at a time, from one thread; all ranks call in the same order.

    Args:
        group: process group, or its backend, without any other user.
        device: where the group's backend expects the bytes: "cpu" for gloo, a CUDA device for NCCL.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.rank = group.rank()
        self._world_size = group.size()
        self._slot_bytes: dict[int, int] = {}
        self.second_collectives = 0

    def __call__(
        self, step: int, index: int, payload: memoryview, is_nonfinite: bool
    ) -> list[Gathered]:
        """Return every rank's payload for bucket ``index`` of ``step``, this rank's included, by rank.

        Raises:
            MessageError: another rank is at another step or bucket.
            RuntimeError: the collective failed, as when a rank has died.
        """
        slot_bytes = self._slot_bytes.get(index, _FIRST_SLOT_BYTES)
        first_bytes = slot_bytes - _HEADER.size
        header = _HEADER.pack(step, index, is_nonfinite, payload.nbytes)
        slots = self._all_gather(slot_bytes, header + payload[:first_bytes])
        headers = [_parse_header(rank, slot, step, index) for rank, slot in enumerate(slots)]
        longest = max(length for length, _ in headers)
        self._slot_bytes[index] = max(
            _slot_bytes_for(longest), slot_bytes - slot_bytes // _SHRINK_DIVISOR
        )
        payloads = [slot[_HEADER.size :] for slot in slots]
        if longest > first_bytes:
            self.second_collectives += 1
            rests = self._all_gather(longest - first_bytes, bytes(payload[first_bytes:]))
            payloads = [
                memoryview(bytes(first) + bytes(rest))
                for first, rest in zip(payloads, rests, strict=True)
            ]
        return [
            Gathered(whole[:length].toreadonly(), flag)
            for whole, (length, flag) in zip(payloads, headers, strict=True)
        ]

    def _all_gather(self, slot_bytes: int, content: bytes) -> list[memoryview]:
        """Gather one slot from every rank; the views are of host memory."""
        slot = torch.zeros(slot_bytes, dtype=torch.uint8)
        memoryview(slot.numpy())[: len(content)] = content
        slots = torch.empty((self._world_size, slot_bytes), dtype=torch.uint8, device=self._device)
        self._group.allgather([list(slots)], [slot.to(self._device)]).wait()
        return [memoryview(gathered.numpy()) for gathered in slots.cpu()]


def _parse_header(rank: int, slot: memoryview, step: int, index: int) -> tuple[int, bool]:
    """Return the length and the flag in one rank's slot, checked to be of this step and bucket."""
    their_step, their_index, is_nonfinite, length = _HEADER.unpack(slot[: _HEADER.size])
    if (their_step, their_index) != (step, index):
        raise MessageError(
            f"rank {rank} sent bucket {their_index} of step {their_step}, this rank is at bucket "
            f"{index} of step {step}: begin with the same model and checkpoint on all ranks"
        )
    return length, is_nonfinite


def _slot_bytes_for(payload_bytes: int) -> int:
    """Return the size of a slot for payloads about as long as this one."""
    wanted = _HEADER.size + payload_bytes + payload_bytes // _HEADROOM_DIVISOR
    return -(-wanted // _SLOT_GRAIN_BYTES) * _SLOT_GRAIN_BYTES
