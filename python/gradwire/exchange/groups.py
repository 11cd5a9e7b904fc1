"""Several tensors, several thresholds: which encoder serves which tensor, and what goes out whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..arrays import device_of
from ..codec import Encoder
from ..errors import MessageError, NonFiniteUpdate
from ..message import Message, apply, max_message_bytes, parse_many
from ..policy import ThresholdPolicy
from .density import check_size_exponent, for_size, learn_first_threshold

__all__ = ["Codec", "Group", "Groups"]

Codec = Literal["threshold", "dense", "bfloat16"]

_DENSE: dict[str, bool | Literal["bfloat16"]] = {
    "threshold": False,
    "dense": True,
    "bfloat16": "bfloat16",
}


@dataclass(frozen=True)
class Group:
    """One encoder and the tensors that it serves.

    Attributes:
        encoder: its ``key`` is the number of the group.
        tensors: their places among the tensors of the model; None: all, however many arrays they come in.
        is_dense: whether its updates always go out whole, as the values they are.
    """

    encoder: Encoder
    tensors: tuple[int, ...] | None = None
    is_dense: bool = False


class Groups:
    """The tensors of a model, divided among encoders: each group has its own threshold and residual.

    A step's payload is the groups' messages one after the other.

    Args:
        groups: in the order of their messages; ``Groups.of`` makes them for a model.

    Attributes:
        groups: as given.
        encoders: theirs, in order.
        numel: elements of all groups.

    Raises:
        ValueError: no group, or two encoders with the same key.

    >>> import numpy as np, gradwire as gw
    >>> model = [np.zeros((64, 64), np.float32), np.zeros(64, np.float32)]
    >>> len(gw.Groups.of(model, threshold=gw.TargetDensity(1e-3)))
    2
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        keys = [group.encoder.key for group in groups]
        if not groups or len(set(keys)) != len(keys):
            raise ValueError(f"every group needs an encoder with a key of its own, got keys {keys}")
        self.groups = tuple(groups)
        self.encoders = tuple(group.encoder for group in self.groups)
        self.numel = sum(encoder.numel for encoder in self.encoders)

    @staticmethod
    def of(
        params: Sequence[Any],
        threshold: ThresholdPolicy | float | None = None,
        *,
        dense_below: int = 1024,
        dense_one_dimensional: bool = True,
        assign: Sequence[int] | None = None,
        thresholds: Mapping[int, ThresholdPolicy | float] | None = None,
        size_exponent: float = 0.5,
        **encoder_options: Any,
    ) -> Groups:
        """Return the groups for a model's tensors.

        Small tensors and those of one dimension (biases, norms) are worth more than their bytes: they share one last
        group whose updates go out whole, in one message.

        Args:
            params: the tensors, or anything else with a ``shape``.
            threshold: policy of every group that ``thresholds`` does not name. One that aims at a density takes its
                first threshold from the first update; its ``initial`` serves only where that is not in host memory.
            dense_below: tensors of fewer elements go out whole.
            dense_one_dimensional: so do tensors with fewer than two dimensions.
            assign: for each tensor the number of its group, counting from 0; those that go out whole are passed over.
                None: a group for each tensor.
            thresholds: policies by number of the group.
            size_exponent: where ``threshold`` aims at a density, the largest group gets that, and one that is k times
                as small k^size_exponent times as much, up to 0.08: bytes then grow slower than sizes, and a small
                tensor, in which every element matters more, waits less. 0.0: all the same.
            encoder_options: for every encoder: ``dtype``, ``shakeup``, ``clip``, ``on_nonfinite``, ``threads``.

        Raises:
            ValueError: ``assign`` is not as long as ``params``, ``thresholds`` names no group, or ``size_exponent`` is
                negative.

        >>> import numpy as np, gradwire as gw
        >>> model = [np.zeros((64, 64), np.float32), np.zeros(64, np.float32)]
        >>> [(group.encoder.numel, group.is_dense) for group in gw.Groups.of(model).groups]
        [(4096, False), (64, True)]
        """
        check_size_exponent(size_exponent)
        shapes = [tuple(one.shape) for one in params]
        if assign is not None and len(assign) != len(shapes):
            raise ValueError(f"assign names {len(assign)} tensors of {len(shapes)}")
        coded: dict[int, list[int]] = {}
        whole: list[int] = []
        for index, shape in enumerate(shapes):
            is_thin = dense_one_dimensional and len(shape) < 2
            if is_thin or math.prod(shape) < dense_below:
                whole.append(index)
            else:
                coded.setdefault(index if assign is None else assign[index], []).append(index)
        members = [coded[number] for number in sorted(coded)]
        policies = thresholds or {}
        largest = max((_numel(shapes, tensors) for tensors in members), default=0)
        if not set(policies) <= set(range(len(members))):
            raise ValueError(
                f"thresholds are for groups {sorted(policies)}, there are {len(members)}"
            )

        def group(key: int, tensors: list[int], *, is_dense: bool) -> Group:
            numel = _numel(shapes, tensors)
            own = for_size(threshold, numel, largest, size_exponent)
            policy = policies.get(key, own)
            return Group(
                Encoder(numel, policy, key=key, **encoder_options), tuple(tensors), is_dense
            )

        made = [group(key, tensors, is_dense=False) for key, tensors in enumerate(members)]
        if whole:
            made.append(group(len(members), whole, is_dense=True))
        return Groups(made)

    @staticmethod
    def around(encoder: Encoder | Groups) -> Groups:
        """Return groups as they are, a single encoder as the only group.

        Raises:
            TypeError: neither.
        """
        if not isinstance(encoder, (Encoder, Groups)):
            raise TypeError(f"enc must be an Encoder or Groups, got {encoder!r}")
        return encoder if isinstance(encoder, Groups) else Groups([Group(encoder)])

    def __len__(self) -> int:
        return len(self.groups)

    def select(self, arrays: Any, index: int) -> Any:
        """Return those of the model's arrays that one group serves."""
        tensors = self.groups[index].tensors
        if tensors is None:
            return arrays
        if not isinstance(arrays, (list, tuple)):
            raise TypeError(
                f"groups take a list of the model's tensors, got {type(arrays).__name__}"
            )
        return [arrays[tensor] for tensor in tensors]

    def check_params(self, params: Any) -> None:
        """Refuse parameters that no step could add to, before anything is encoded for them.

        Raises:
            TypeError, ValueError: another size than the encoders', a dtype or layout that ``apply`` does not take,
                or too few or too many arrays.
        """
        served = [group.tensors for group in self.groups if group.tensors is not None]
        if served and isinstance(params, (list, tuple)):
            places = {place for tensors in served for place in tensors}
            if places != set(range(len(params))):
                raise ValueError(
                    f"{len(params)} parameters for groups of {len(places)} tensors, the last of which is {max(places)}"
                )
        nothing = np.empty(0, np.int64), np.empty(0, np.bool_)
        for index, group in enumerate(self.groups):
            arrays = self.select(params, index)
            if device_of(arrays) >= 0:
                continue
            empty = Message.from_entries(*nothing, numel=group.encoder.numel, threshold=1.0)
            try:
                apply(empty, arrays)
            except (TypeError, ValueError) as error:
                raise type(error)(
                    f"the parameters do not fit the encoder with key {group.encoder.key}: {error}"
                ) from error

    def residuals(self, arrays: Sequence[Any]) -> list[NDArray[Any]]:
        """Return for each of the model's arrays its part of a residual: a writable view in the array's shape.

        Raises:
            ValueError: the arrays are not those of the groups, or a residual is not in this machine's memory.
        """
        found: dict[int, NDArray[Any]] = {}
        for group in self.groups:
            if device_of(group.encoder.residual) >= 0:
                raise ValueError(
                    f"the residual of group {group.encoder.key} is on a device, which apply_residual "
                    "cannot reach: use an encoder in host memory"
                )
            tensors = range(len(arrays)) if group.tensors is None else group.tensors
            start = 0
            for tensor in tensors:
                shape = arrays[tensor].shape
                stop = start + math.prod(shape)
                found[tensor] = group.encoder.residual[start:stop].reshape(shape)
                start = stop
            if start != group.encoder.numel:
                raise ValueError(
                    f"{start} elements for group {group.encoder.key} of {group.encoder.numel}"
                )
        return [found[tensor] for tensor in range(len(arrays))]

    def max_payload_bytes(self, codec: Codec) -> int:
        """Return the most bytes that one step's messages can have."""
        sizes = []
        for group in self.groups:
            is_dense = group.is_dense or codec != "threshold"
            sizes.append(max_message_bytes(group.encoder.numel, is_dense, group.encoder.dtype))
        return sum(sizes)

    def encode(
        self, update: Any, codec: Codec, refresh: Callable[[int], None] | None = None
    ) -> list[Message]:
        """Return every group's message, in host memory; None for ``update``: it is in the residuals already.

        Encoders on a device work beside each other, and are waited for together.

        Args:
            update: one array or several, not modified.
            codec: whether they go out as ternary messages or whole.
            refresh: called with a group's number right before that is encoded, to bring its residual up to date: the
                encoder then finds it in the cache.

        Raises:
            NonFiniteUpdate: as ``Encoder.encode``; what other groups had encoded is back in their residuals.
        """
        encoded: list[Any] = []
        try:
            for index, group in enumerate(self.groups):
                part = None if update is None else self.select(update, index)
                if refresh is not None:
                    refresh(index)
                dense = _DENSE["dense" if group.is_dense and codec == "threshold" else codec]
                if not dense:
                    learn_first_threshold(group.encoder, part)
                encoded.append(group.encoder.encode(part, dense=dense))
            return [_owned(message) for message in encoded]
        except BaseException:
            self._undo(encoded)
            raise

    def flush(self) -> list[Message]:
        """Return everything that is left in the residuals, as dense messages.

        Raises:
            NonFiniteUpdate: as ``encode``.
        """
        encoded: list[Any] = []
        try:
            for encoder in self.encoders:
                encoded.append(encoder.flush())
            return [_owned(message) for message in encoded]
        except BaseException:
            self._undo(encoded)
            raise

    def _undo(self, encoded: Sequence[Any]) -> None:
        """Put back those of the first groups' messages that were not refused, which took nothing."""
        for encoder, message in zip(self.encoders, encoded, strict=False):
            with suppress(NonFiniteUpdate):
                apply(_owned(message), encoder.residual)

    def put_back(self, messages: Sequence[Message], factor: float = 1.0) -> None:
        """Add messages that were not sent, times a factor, to the residuals they came from."""
        for encoder, message in zip(self.encoders, messages, strict=False):
            apply(message, encoder.residual, factor)

    def parse(self, payload: memoryview) -> list[Message]:
        """Return the messages of a payload, one for each group, and whatever follows them.

        Raises:
            MessageError: not messages, or not those of these groups.
        """
        messages = parse_many(payload)
        if len(messages) < len(self.groups):
            raise MessageError(
                f"{len(messages)} messages for {len(self.groups)} groups of parameters"
            )
        for encoder, message in zip(self.encoders, messages, strict=False):
            if message.numel != encoder.numel or message.key != encoder.key:
                raise MessageError(
                    f"a message for group {message.key} has {message.numel} elements, this node's "
                    f"updates of group {encoder.key} have {encoder.numel}"
                )
        return messages

    def density(self, messages: Sequence[Message]) -> float:
        """Return changed elements / elements of one step's messages."""
        changed = sum(message.count for message in messages[: len(self.groups)])
        return changed / self.numel if self.numel else 0.0

    def residual_norm(self) -> float:
        """Return the Euclidean norm of everything that was not sent yet."""
        residuals = [_host_residual(encoder) for encoder in self.encoders]
        return math.sqrt(math.fsum(float(np.dot(one, one)) for one in residuals))

    def rescale(self, factor: float) -> None:
        """Multiply everything that was not sent yet."""
        for encoder in self.encoders:
            if device_of(encoder.residual) < 0:
                encoder.residual[...] *= encoder.residual.dtype.type(factor)
            else:
                state = encoder.state_dict()
                state["residual"] *= state["residual"].dtype.type(factor)
                encoder.load_state_dict(state)


def _numel(shapes: Sequence[tuple[int, ...]], tensors: Sequence[int]) -> int:
    return sum(math.prod(shapes[index]) for index in tensors)


def _owned(message: Any) -> Message:
    """Return a message in host memory; of one on a device a copy, because its own memory is as large as its ceiling.

    Waits for the device.

    Raises:
        NonFiniteUpdate: what became of the message there.
    """
    return message if isinstance(message, Message) else Message.parse(bytes(message))


def _host_residual(encoder: Encoder) -> NDArray[Any]:
    """Return an encoder's residual, or a copy of it where it lies on a device."""
    if device_of(encoder.residual) < 0:
        return encoder.residual
    copy: NDArray[Any] = encoder.state_dict()["residual"]
    return copy
