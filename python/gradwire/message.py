"""Messages: one encoded update each, as self-describing bytes (``docs/message-format.md``)."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from . import _core
from ._core import Message, parse_many
from .arrays import cuda_core, device_of, stream_of

__all__ = [
    "Message",
    "apply",
    "apply_many",
    "cuda_message",
    "decode",
    "dense_message",
    "max_message_bytes",
    "parse_many",
]


def apply(
    message: Message, target: Any, scale: float = 1.0, *, stream: Any = None, threads: int = 1
) -> None:
    """Add a decoded message to ``target``: ``target += scale * decoded``.

    Changed elements get plus or minus ``float32(scale * threshold)``, rounded once. The whole message is checked
    before the first element changes.

    On a CUDA device the work is enqueued. A message that lies there (``encode``'s on a device, or
    ``CudaMessage.at``) is checked there too, without waiting: if it is refused the target stays as it was, and the
    message says so when it is next looked at (``message.check()``). Any other message is copied to the device first,
    and that is waited for.

    Args:
        message: the message.
        target: float32 or float64 array, C-contiguous and writable, or a list or tuple of such arrays that
            together have ``message.numel`` elements, all on the CPU or on one CUDA device; modified in place.
        scale: finite factor.
        stream: on a CUDA device, see ``gradwire.arrays.stream_of``.
        threads: on the CPU, most threads, each for a part of the target; the bits are the same at every number.

    Raises:
        MessageError: the message's payload is inconsistent; the target is as it was.
        TypeError: the target's dtype is neither float32 nor float64.
        ValueError: wrong size, device or layout, a read-only target, arrays that overlap, a scale that is not
            finite, or ``threads`` out of range.

    >>> import numpy as np, gradwire as gw
    >>> encoder = gw.Encoder(3, threshold=gw.FixedThreshold(0.5))
    >>> params = np.zeros(3, np.float32)
    >>> gw.apply(encoder.encode(np.array([0.75, 0.25, -0.5], np.float32)), params)
    >>> params.tolist()
    [0.5, 0.0, -0.5]
    """
    device = device_of(target)
    if device < 0:
        _core.apply(_on_host(message), target, scale, threads)
    else:
        number = stream_of(stream, target, device)
        cuda_core().apply_many([message], target, scale, device, number)


def apply_many(
    messages: list[Message] | tuple[Message, ...],
    target: Any,
    scale: float = 1.0,
    *,
    stream: Any = None,
    threads: int = 1,
) -> None:
    """Add several messages to ``target`` in one pass over it, bit for bit as ``apply`` in the order of the list.

    Args, Raises: as ``apply``. All messages are checked before the first element changes.
    """
    device = device_of(target)
    if device < 0:
        on_host = [_on_host(message) for message in messages]
        _core.apply_many(on_host, target, scale, threads)
    else:
        number = stream_of(stream, target, device)
        cuda_core().apply_many(list(messages), target, scale, device, number)


def apply_to_both(
    messages: list[Message],
    target: Any,
    beside: Any,
    *,
    own: int | None,
    scale: float,
    threads: int = 1,
) -> None:
    """Add several messages to two targets in one pass, each decoded once: ``apply_many`` to both.

    Args:
        messages: as for ``apply_many``, in host memory.
        target: as for ``apply``, on the CPU.
        beside: arrays of the same sizes and dtypes; modified in place too.
        own: place of the message that ``beside`` holds already, which adds (scale - 1) times itself there; None: none.
        scale: finite factor.
        threads: as for ``apply``.

    Raises:
        MessageError, TypeError, ValueError: as ``apply_many``, for either.
    """
    place = len(messages) if own is None else own
    _core.apply_to_both(messages, target, beside, place, scale, threads)


def apply_with_momentum(
    messages: list[Message],
    target: Any,
    velocity: Any,
    *,
    momentum: float,
    scale: float,
    beside: Any,
    held: list[Message],
    threads: int = 1,
) -> None:
    """Add several messages and let what they add go on: Nesterov's momentum, in one pass.

    With added = scale * (sum of the messages): ``velocity = momentum * (velocity + added)``, then ``target += added +
    velocity``, and ``beside`` likewise, less what it holds.

    Args:
        messages: as for ``apply_many``, in host memory.
        target: as for ``apply``, on the CPU.
        velocity: arrays of the same sizes and dtypes, zeros at first; modified in place too.
        momentum: finite factor.
        scale: finite factor.
        beside: more arrays like the target, or an empty list; modified in place too.
        held: those of the messages that ``beside`` holds already, in full.
        threads: as for ``apply``.

    Raises:
        MessageError, TypeError, ValueError: as ``apply_many``, for any of the arrays.
    """
    _core.apply_with_momentum(messages, target, velocity, momentum, scale, beside, held, threads)


def decode(message: Message) -> NDArray[Any]:
    """Return what the message adds: float32[numel], or float64[numel] for a dense float64 message.

    Raises:
        MessageError: the message's payload is inconsistent.
    """
    return _core.decode(_on_host(message))


def cuda_message(buffer: Any) -> Any:
    """Return the message that begins an array on a CUDA device: what an all-gather brought, for ``apply``.

    Nothing is read and nothing is waited for; the message is checked on the device when it is applied, and says what
    was wrong when it is next looked at.

    Args:
        buffer: uint8, contiguous, kept alive; may be longer than the message.

    Raises:
        TypeError: not uint8.
        ValueError: not contiguous, or not on a CUDA device.
        BackendUnavailable: there is no CUDA here.
    """
    return cuda_core().CudaMessage.at(buffer)


def dense_message(values: Any, *, key: int = 0, step: int = 0, bfloat16: bool = False) -> Message:
    """Return the values of one array as a dense message: snapshots, and links too fast for coding to pay.

    Args:
        values: float32 or float64 array of any shape, C-contiguous, on the CPU; copied.
        key: group index, 0 to 2^32 - 1.
        step: step number, 0 to 2^32 - 1.
        bfloat16: round to bfloat16 (nearest-even), half or a quarter of the bytes.

    Raises:
        TypeError: another dtype.
        ValueError: not contiguous, or not on the CPU.
    """
    return _core.dense(values, "bfloat16" if bfloat16 else "", key, step)


def max_message_bytes(numel: int, dense: bool = False, dtype: str = "float32") -> int:
    """Return the most bytes that a message of ``numel`` elements can have, whatever the data.

    Args:
        numel: elements, at most 2^48.
        dense: False: the ceiling of a ternary message, 48 + ceil(0.22 * numel). True: the size of a dense message.
        dtype: of a dense message: "float32", "float64" or "bfloat16".

    Raises:
        ValueError: ``numel`` or ``dtype`` is out of range.

    >>> max_message_bytes(1_000_000)
    220048
    """
    if dtype not in ("float32", "float64", "bfloat16"):
        raise ValueError(f'dtype must be "float32", "float64" or "bfloat16", got {dtype!r}')
    if numel < 0:
        raise ValueError(f"numel must not be negative, got {numel}")
    return _core.max_message_bytes(numel, dense, dtype)


def _on_host(message: Any) -> Message:
    """Return a message on a device as one of the CPU's: a view of its pinned copy, or a copy."""
    if isinstance(message, Message):
        return message
    if hasattr(message, "check"):
        message.check()  # what became of it there; its buffer would only be refused, with a BufferError
    return Message.parse(message)
