"""Groups of tensors with one encoder each."""

from __future__ import annotations

import math
import os
import reprlib
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..arrays import check_arrays, device_of
from ..codec import Encoder, dtype_of_residual
from ..errors import NonFiniteUpdate
from ..message import Message, apply, max_message_bytes
from ..partition import Partition
from ..policy import (
    TargetBytes,
    ThresholdPolicy,
    as_number,
    default_policy,
    divide_budget,
    nodes_budget,
    policy_for_tensor,
)
from ..state import check_flag

__all__ = ["Codec", "Group", "Groups", "host_message", "physical_bytes"]

Codec = Literal["threshold", "dense", "bfloat16"]

# Documents, and the headers of parts: a few dozen bytes for each node or array.
_DOCUMENT_BYTES = 16 << 20

_DENSE: dict[str, bool | Literal["bfloat16"]] = {
    "threshold": False,
    "dense": True,
    "bfloat16": "bfloat16",
}


@dataclass(frozen=True)
class Group:
    """One encoder and its tensors.

    Attributes:
        encoder: its ``key`` is the number of the group.
        tensors: indices of the tensors in the model; None: all, however many arrays there are.
        is_dense: whether the group's updates are always sent as dense messages.
    """

    encoder: Encoder
    tensors: tuple[int, ...] | None = None
    is_dense: bool = False


class Groups:
    """The tensors of a model, divided among encoders: each group has its own threshold and residual.

    A step's payload is the concatenation of the groups' messages.

    Args:
        groups: in the order of their messages; ``Groups.of`` makes them for a model.

    Attributes:
        groups: as given.
        encoders: of the groups, in order.
        numel: elements of all groups.
        keeps_residuals: whether there always is memory for the residuals.

    Raises:
        ValueError: no group, two encoders with the same key, or two groups with the same tensor.
        TypeError: ``groups`` are of another kind.

    >>> import numpy as np, gradwire as gw
    >>> model = [np.zeros((64, 64), np.float32), np.zeros(64, np.float32)]
    >>> [(group.encoder.numel, group.is_dense) for group in gw.Groups.of(model).groups]
    [(4096, False), (64, True)]
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(groups) if isinstance(groups, Iterable) else ()
        if not all(isinstance(group, Group) for group in self.groups) or not self.groups:
            raise TypeError(
                f"groups must be a list of Group, got {reprlib.repr(groups)}; Groups.of(params) makes one for a model"
            )
        keys = [group.encoder.key for group in self.groups]
        if len(set(keys)) != len(keys):
            raise ValueError(f"every group needs an encoder with a key of its own, got keys {keys}")
        times = Counter(tensor for group in self.groups for tensor in group.tensors or ())
        if several := [tensor for tensor in times if times[tensor] > 1]:
            raise ValueError(f"tensors {several} belong to several groups: give each to one")
        # How many tensors the groups name, and the last of them: they are to be all of the model's.
        self._tensors = len(times), max(times, default=-1)
        self.encoders = tuple(group.encoder for group in self.groups)
        self.numel = sum(encoder.numel for encoder in self.encoders)
        self.keeps_residuals = any(encoder.keeps_residual for encoder in self.encoders)
        # Of encoders on a device, whose memory stays where it is: views of the residuals, and the arrays' shapes.
        self._on_device: tuple[list[Any], list[NDArray[Any]]] = [], []

    @staticmethod
    def of(
        params: Sequence[Any],
        threshold: ThresholdPolicy | TargetBytes | float | None = None,
        *,
        is_adaptive: bool = False,
        every: int = 1,
        dense_below: float = 1024,
        dense_one_dimensional: bool = True,
        thresholds: Mapping[int, ThresholdPolicy | TargetBytes | float] | None = None,
        **encoder_options: Any,
    ) -> Groups:
        """Return one group for each of a model's tensors, and one dense group for all small ones.

        Small tensors and those of one dimension (biases, norms) matter more than their bytes: they share one last
        group whose updates are sent as dense messages. Where ``threshold`` aims at a density, the largest tensor gets
        that density, and one that is k times as small sqrt(k) times as much, up to 0.08.

        A budget (``TargetBytes``) is one for all groups: the dense messages count, and so do the groups that
        ``thresholds`` names, with their own budget or the largest messages that they can have. What these leave is
        divided by the roots of the tensors' sizes. Where dense messages would take more than a quarter of the budget,
        the small tensors are sent by a threshold, too.

        Args:
            params: the tensors, or anything else with a ``shape``.
            threshold: policy of every group that ``thresholds`` does not name; None: by the rule of
                ``policy.default_policy`` for the whole model, as ``share`` has it.
            is_adaptive: whether the updates are an adaptive optimiser's, for that rule.
            every: steps between exchanges, for that rule.
            dense_below: tensors of fewer elements are sent as dense messages.
            dense_one_dimensional: so are tensors with fewer than two dimensions.
            thresholds: policies by number of the group; the tensors that are sent densely are not counted.
            encoder_options: for every encoder: ``dtype``, ``shakeup``, ``clip``, ``on_nonfinite``, ``threads``.

        Raises:
            ValueError: ``thresholds`` names no group, or a budget is too small for so many.
            TypeError: ``params`` is a dict or empty, or another argument is of the wrong kind.
        """
        is_array = hasattr(params, "shape") or not isinstance(params, Iterable)
        arrays: list[Any] = [params] if is_array else list(params)
        check_arrays(arrays)
        is_adaptive = check_flag("is_adaptive", is_adaptive)
        dense_below = as_number("dense_below", dense_below)
        shapes = [tuple(array.shape) for array in arrays]
        sizes = [math.prod(shape) for shape in shapes]
        default = default_policy(sum(sizes), is_adaptive=is_adaptive, every=every)
        if threshold is None:
            threshold = default
        dense = [
            index
            for index, shape in enumerate(shapes)
            if (dense_one_dimensional and len(shape) < 2) or sizes[index] < dense_below
        ]
        coded = sorted(set(range(len(shapes))).difference(dense))
        largest = max((sizes[index] for index in coded), default=0)
        policies = thresholds or {}
        if not isinstance(policies, Mapping):
            raise TypeError(f"thresholds must be a dict of policies, got {reprlib.repr(policies)}")
        if not set(policies) <= set(range(len(coded))):
            raise ValueError(
                f"thresholds are for groups {sorted(policies)}, there are {len(coded)}"
            )
        dense_numel = sum(sizes[index] for index in dense)
        is_dense = True
        rest: ThresholdPolicy | TargetBytes | float = threshold
        if isinstance(threshold, TargetBytes):
            sizes_of_budget = [
                sizes[index] for key, index in enumerate(coded) if key not in policies
            ]
            dtype = dtype_of_residual(encoder_options.get("dtype", "float32"))
            dense_bytes = max_message_bytes(dense_numel, True, dtype) if dense else 0
            is_dense = dense_bytes <= threshold.max_bytes_per_step // 4
            left = threshold.max_bytes_per_step - (dense_bytes if is_dense else 0)
            for key, policy in policies.items():
                left -= (
                    policy.max_bytes_per_step
                    if isinstance(policy, TargetBytes)
                    else max_message_bytes(sizes[coded[key]])
                )
            if not is_dense:
                sizes_of_budget.append(dense_numel)
            budgets = iter(divide_budget(threshold, left, sizes_of_budget))
            policies = {
                key: policies[key] if key in policies else next(budgets)
                for key in range(len(coded))
            }
            rest = next(budgets, threshold)
        groups = []
        # The key is the group's number on the wire, so the order of the groups has to be the same on all nodes.
        for key, index in enumerate(coded):
            numel = sizes[index]
            policy = policies.get(key, policy_for_tensor(threshold, numel, largest))
            encoder = Encoder(numel, policy, key=key, **encoder_options)
            groups.append(Group(encoder, (index,)))
        if dense:
            encoder = Encoder(dense_numel, rest, key=len(coded), **encoder_options)
            groups.append(Group(encoder, tuple(dense), is_dense=is_dense))
        return Groups(groups)

    @property
    def tensors(self) -> list[list[int] | None]:
        """Indices of every group's tensors; None: all of the model's."""
        return [None if group.tensors is None else list(group.tensors) for group in self.groups]

    def __len__(self) -> int:
        return len(self.groups)

    def select(self, arrays: Any, index: int) -> Any:
        """Return those of the model's arrays that belong to one group."""
        tensors = self.groups[index].tensors
        if tensors is None:
            return arrays
        if not isinstance(arrays, (list, tuple)):
            raise TypeError(
                f"groups take a list of the model's tensors, got {type(arrays).__name__}"
            )
        return [arrays[tensor] for tensor in tensors]

    def check_params(self, params: Any) -> None:
        """Refuse parameters to which no step could add.

        Raises:
            TypeError, ValueError: another size than the encoders', a dtype or layout that ``apply`` does not take,
                or too few or too many arrays.
        """
        self._check_count(params, "parameters")
        # An empty message is applied: ``apply`` itself says what it cannot take, in its own words.
        nothing = np.empty(0, np.int64), np.empty(0, np.bool_)
        for index, encoder in enumerate(self.encoders):
            arrays = self.select(params, index)
            if device_of(arrays) >= 0:
                if str(encoder.device) == "cpu":
                    raise ValueError(
                        f"the parameters are on a device, the encoder with key {encoder.key} in host memory: give it "
                        f'device="cuda:{device_of(arrays)}"'
                    )
                continue
            empty = Message.from_entries(*nothing, numel=encoder.numel, threshold=1.0)
            try:
                apply(empty, arrays)
            except (TypeError, ValueError) as error:
                raise type(error)(
                    f"the parameters do not fit the encoder with key {encoder.key}: {error}"
                ) from error

    def check_update(self, update: Any) -> None:
        """Refuse an update before any group takes its part of it.

        Raises:
            TypeError, ValueError: too few or too many arrays, or those of a group do not fit its encoder.
        """
        self._check_count(update, "arrays of the update")
        for index, encoder in enumerate(self.encoders):
            try:
                encoder.check_update(self.select(update, index))
            except (TypeError, ValueError) as error:
                tensors = self.groups[index].tensors
                of = "" if tensors is None else f" of tensors {reprlib.repr(list(tensors))}"
                raise type(error)(
                    f"the update does not fit the encoder with key {encoder.key}{of}: {error}"
                ) from error

    def _check_count(self, arrays: Any, name: str) -> None:
        """Raise `ValueError` for a list of other tensors than the groups'."""
        count, last = self._tensors
        # One tensor too many would never be trained, and nothing else would say so.
        if count and isinstance(arrays, (list, tuple)) and not count == len(arrays) == last + 1:
            raise ValueError(
                f"{len(arrays)} {name} for groups of {count} tensors, the last of which is {last}"
            )

    def residuals(self, arrays: Sequence[Any]) -> list[NDArray[Any]]:
        """Return the residual of each of the model's arrays: a writable view in the array's shape.

        Residuals on a device are torch's tensors. Encoders that keep none get one, of zeros.

        Raises:
            ValueError: the arrays are not those of the groups, or a residual is on another device.
        """
        device = device_of(list(arrays))
        shapes = [array.shape for array in arrays]
        if device >= 0 and shapes == self._on_device[0]:
            return self._on_device[1]
        for encoder in self.encoders:
            if encoder.device_number != device:
                raise ValueError(
                    f"the residual of group {encoder.key} is on {encoder.device}, the parameters are not: give the "
                    "encoder their device"
                )
        residuals = self.whole_residuals()
        if device >= 0:
            as_tensor = sys.modules["torch"].as_tensor
            residuals = [as_tensor(residual, device=f"cuda:{device}") for residual in residuals]
        parts = split_by_tensor(residuals, self.tensors, arrays)
        if device >= 0:
            self._on_device = shapes, parts
        return parts

    def whole_residuals(self) -> list[Any]:
        """Return the residual of every group; encoders that keep none get one, of zeros."""
        for encoder in self.encoders:
            encoder.make_residual()
        return [encoder.residual for encoder in self.encoders]

    @property
    def has_residuals(self) -> bool:
        """Whether there is memory for the residuals now."""
        return any(encoder.has_residual for encoder in self.encoders)

    def drop_residuals(self) -> None:
        """Free the residuals that are not kept."""
        self._on_device = [], []
        for encoder in self.encoders:
            encoder.drop_residual()

    @property
    def largest_bytes(self) -> int:
        """A bound of everything that nodes send each other about these groups in one message."""
        # Dense messages, and besides them what names nodes and arrays.
        return self.max_payload_bytes("dense") + _DOCUMENT_BYTES

    def dense_bytes(self, codec: Codec) -> int:
        """Return the size of the messages of a step that are dense."""
        width = {"bfloat16": 2}.get(codec)
        return sum(
            group.encoder.numel * (width or np.dtype(group.encoder.dtype).itemsize)
            for group in self.groups
            if group.is_dense or codec != "threshold"
        )

    def max_payload_bytes(self, codec: Codec) -> int:
        """Return the largest possible size of one step's messages."""
        return sum(
            max_message_bytes(
                group.encoder.numel, group.is_dense or codec != "threshold", group.encoder.dtype
            )
            for group in self.groups
        )

    def encode(
        self,
        update: Any,
        codec: Codec | None,
        before: Any = None,
        partitions: Sequence[Partition] | None = None,
    ) -> list[Any]:
        """Return every group's message, of an encoder on a device in its memory.

        Encoders on a device work side by side, and are waited for together.

        Args:
            update: one array or several, not modified; None: the residuals hold the update already.
            codec: ternary or dense messages; None: everything that is left, as dense messages.
            before: as for ``Encoder.encode``, arrays like the update.
            partitions: one for each group; every group then has a list of messages, one for each part.

        Raises:
            ValueError: too few or too many arrays; nothing was taken.
            NonFiniteUpdate: as ``Encoder.encode``, of the first such group; all residuals have what is finite.
        """

        def encode_group(index: int) -> Any:
            group = self.groups[index]
            encoder: Any = group.encoder
            parts = None if partitions is None else partitions[index]
            dense = True if codec is None else _DENSE[codec] or group.is_dense
            arrays = None if update is None else self.select(update, index)
            limit = None if dense or parts is None else nodes_budget(encoder.policy, parts.sizes)
            options: dict[str, Any] = {"dense": dense, "parts": parts}
            if limit is not None:
                options["max_bytes"] = limit.max_bytes_per_step
            if before is not None:
                options["before"] = self.select(before, index)
            return encoder.encode(arrays, **options)

        self._check_count(update, "arrays of the update")
        # Encoders on a device return at once and work side by side. They are waited for together, after the last was
        # started.
        encoded: list[Any] = []
        refused: NonFiniteUpdate | None = None
        try:
            for index in range(len(self.groups)):
                try:
                    encoded.append(encode_group(index))
                except NonFiniteUpdate as error:
                    # The groups after it take their parts of the update into their residuals, as those before it have.
                    refused = refused or error
                    encoded.append(None)
            if refused is not None:
                raise refused
            for messages in encoded:
                for message in messages if isinstance(messages, list) else [messages]:
                    if not isinstance(message, Message):
                        message.check()  # waits
            return encoded
        except BaseException:
            # The other groups have taken their messages out of their residuals.
            for index, (encoder, messages) in enumerate(zip(self.encoders, encoded, strict=False)):
                if messages is None or not encoder.has_residual:
                    continue
                with suppress(NonFiniteUpdate):  # a message that a device refused has taken nothing
                    if partitions is None:
                        apply(host_message(messages), encoder.residual)
                        continue
                    for part, message in zip(partitions[index], messages, strict=True):
                        apply(host_message(message), encoder.residual, part=part)
            raise

    def on_host(self, messages: Sequence[Any]) -> list[Message]:
        """Return every group's message in host memory; if there is no memory for that, they go back to the residuals.

        Raises:
            MemoryError: for copies of messages in a device's memory.
        """
        try:
            return list(map(host_message, messages))
        except BaseException:
            if self.has_residuals:
                self.put_back(messages)
            raise

    def put_back(self, messages: Sequence[Message]) -> None:
        """Add unsent messages to their residuals."""
        for encoder, message in zip(self.encoders, messages, strict=False):
            apply(message, encoder.residual)


def split_by_tensor(
    residuals: Sequence[NDArray[Any]],
    tensors: Sequence[Sequence[int] | None],
    arrays: Sequence[Any],
) -> list[NDArray[Any]]:
    """Return the part of the groups' residuals that belongs to each of the model's arrays: a view in its shape.

    Args:
        residuals: of each group.
        tensors: as ``Groups.tensors``.
        arrays: with the shapes.

    Raises:
        ValueError: the arrays are not those of the groups.
    """
    by_tensor: dict[int, NDArray[Any]] = {}
    for residual, indices in zip(residuals, tensors, strict=True):
        start = 0
        for tensor in range(len(arrays)) if indices is None else indices:
            shape = arrays[tensor].shape
            stop = start + math.prod(shape)
            by_tensor[tensor] = residual[start:stop].reshape(shape)
            start = stop
        if start != math.prod(residual.shape):
            raise ValueError(f"{start} elements for a group of {math.prod(residual.shape)}")
    return [by_tensor[tensor] for tensor in range(len(arrays))]


def host_message(message: Any) -> Message:
    """Return a message in host memory, after waiting for the device; a copy, because the original's memory is large."""
    # The device has computed its checksum, so nothing is checked again before it is applied.
    return message if isinstance(message, Message) else _core.view_message(bytes(message))


def physical_bytes() -> int:
    """Return the size of this machine's memory; what no machine has where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 1 << 62
