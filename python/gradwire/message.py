"""Applying, decoding and creating messages (``docs/message-format.md``)."""

from __future__ import annotations

import reprlib
import sys
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _core
from ._core import Message, parse_many
from .arrays import cuda_core, device_of, stream_of
from .partition import Part
from .state import check_flag, check_range

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
    message: Message,
    target: Any,
    scale: float = 1.0,
    part: Part | None = None,
    *,
    stream: Any = None,
    threads: int = 1,
) -> None:
    """Add a decoded message to ``target``: ``target += scale * decoded``.

    Changed elements get plus or minus ``float32(scale * threshold)``, rounded once. The whole message is checked before
    the first element changes.

    On a CUDA device the work is enqueued. A message in device memory (from ``encode`` on a device, or ``cuda_message``)
    is checked there without waiting: if it is refused, the target is unchanged and ``message.check()`` raises. Other
    messages are copied to the device first, which waits for the copy.

    Args:
        message: the message.
        target: float32 or float64 array, C-contiguous and writable, or a list or tuple of such arrays that together
            have ``message.numel`` elements, all on the CPU or on one CUDA device; modified in place.
        scale: finite factor, not 0.
        part: ``partition[i]`` of a message of this part of the target's elements, as ``encode(parts=partition)``
            returns it; ``target`` then has ``partition.numel`` elements. None for a message of all elements.
        stream: on a CUDA device, see ``gradwire.arrays.stream_of``.
        threads: on the CPU, the most threads, each for a part of the target; the bits do not depend on the number.

    Raises:
        MessageError: the payload is inconsistent, or the message has another number of elements than the part; the
            target is unchanged.
        TypeError: the target is neither float32 nor float64, or another argument is of the wrong kind.
        ValueError: wrong size, device or layout, a read-only target, overlapping arrays, a scale that is 0 or not
            finite, or ``threads`` out of range.

    >>> import numpy as np, gradwire as gw
    >>> encoder = gw.Encoder(3, threshold=gw.FixedThreshold(0.5))
    >>> params = np.zeros(3, np.float32)
    >>> gw.apply(encoder.encode(np.array([0.75, 0.25, -0.5], np.float32)), params)
    >>> params.tolist()
    [0.5, 0.0, -0.5]
    """
    apply_many([message], target, scale, part, stream=stream, threads=threads)


def apply_many(
    messages: list[Message] | tuple[Message, ...],
    target: Any,
    scale: float = 1.0,
    part: Part | None = None,
    *,
    stream: Any = None,
    threads: int = 1,
) -> None:
    """Add several messages to ``target`` in one pass, bit for bit as ``apply`` in the order of the list.

    Arguments and errors are those of ``apply``; all messages are of the same part. All messages are checked before the
    first element changes.
    """
    if type(scale) is not float:
        scale = _number("scale", scale)
    if scale == 0.0:
        raise ValueError("scale is 0: nothing would be added")
    if type(threads) is not int or not 1 <= threads <= 1024:
        threads = check_range("threads", threads, 1, 1024)
    if part is not None and not isinstance(part, Part):
        raise TypeError(f"part must be partition[i] of a Partition, got {reprlib.repr(part)}")
    device = device_of(target)
    if device < 0:
        on_host = [_on_host(message) for message in messages]
        _core.apply_many(on_host, target, scale, threads, part)
    else:
        number = stream_of(stream, target, device)
        on_device = list(messages)
        arrays = target if isinstance(target, (list, tuple)) else [target]
        if stream is None and arrays and type(arrays[0]).__module__.split(".")[0] == "torch":
            numel = sum(array.numel() for array in arrays) if part is None else part.numel
            on_device = [_uploaded(message, numel, device, number) for message in messages]
        cuda_core().apply_many(on_device, target, scale, part, device, number)


def apply_to_both(
    messages: list[Message],
    target: Any,
    second: Any,
    *,
    held: int | None,
    scale: float,
    threads: int = 1,
) -> None:
    """Add several messages to two targets: on the CPU in one pass, which decodes each message once.

    Args:
        messages: the messages.
        target: as for ``apply``.
        second: arrays of the same sizes and dtypes, on the same device; modified in place too.
        held: index of the message that ``second`` already contains, which is added to it with factor (scale - 1); or
            None.
        scale: finite factor.
        threads: as for ``apply``.

    Raises:
        MessageError, TypeError, ValueError: as for ``apply``.
    """
    index = len(messages) if held is None else held
    if device_of(target) < 0:
        _core.apply_to_both(messages, target, second, index, scale, threads)
        return
    apply_many(messages, target, scale)
    # Three calls keep the order of the additions, on which the bits depend.
    parts = (messages[:index], messages[index : index + 1], messages[index + 1 :])
    for group, factor in zip(parts, (scale, scale - 1.0, scale), strict=True):
        if group and factor:
            apply_many(group, second, factor)


def apply_with_momentum(
    messages: list[Message],
    target: Any,
    velocity: Any,
    *,
    momentum: float,
    scale: float,
    second: Any = (),
    held: int | None = None,
    threads: int = 1,
) -> None:
    """Add several messages with Nesterov momentum: on the CPU in one pass.

    With added = scale * (sum of the messages): ``velocity = momentum * (velocity + added)``, then ``target += added +
    velocity``. The second target gets the same, less the message that it already contains.

    Args:
        messages: the messages.
        target: as for ``apply``; on a device torch's tensors.
        velocity: arrays of the same sizes and dtypes, initially zero; modified in place too.
        momentum: finite factor.
        scale: finite factor.
        second: more arrays like the target, modified in place too, or an empty sequence.
        held: index of the message that ``second`` already contains, or None.
        threads: as for ``apply``.

    Raises:
        MessageError, TypeError, ValueError: as for ``apply``.
    """
    index = len(messages) if held is None else held
    if device_of(target) < 0:
        _core.apply_with_momentum(
            messages, target, velocity, momentum, scale, second, index, threads
        )
        return
    changes = [tensor.new_zeros(tensor.shape) for tensor in target]
    apply_many(messages, changes, scale)
    for change, speed in zip(changes, velocity, strict=True):
        speed.add_(change).mul_(momentum)
        change.add_(speed)
    for tensors in (target, second):
        for tensor, change in zip(tensors, changes, strict=bool(tensors)):
            tensor.add_(change)
    if second and index < len(messages):
        apply(messages[index], second, -1.0)


def decode(message: Message) -> NDArray[Any]:
    """Return the decoded update: float32[numel], or float64[numel] of a dense float64 message.

    Raises:
        MessageError: the payload is inconsistent.
    """
    return _core.decode(_on_host(message))


def cuda_message(buffer: Any) -> Any:
    """Return the message at the start of an array on a CUDA device, for ``apply`` after an all-gather.

    This neither reads the message nor waits for the device. ``apply`` checks the message on the device, and
    ``message.check()`` raises if it was refused.

    Args:
        buffer: uint8, contiguous, kept alive; may be longer than the message.

    Raises:
        TypeError: not uint8.
        ValueError: not contiguous, or not on a CUDA device.
        BackendUnavailable: the CUDA backend is not usable here.
    """
    return cuda_core().CudaMessage.at(buffer)


def dense_message(values: Any, *, key: int = 0, step: int = 0, bfloat16: bool = False) -> Message:
    """Return the values of one array as a dense message.

    Args:
        values: float32 or float64 array of any shape, C-contiguous, on the CPU; copied.
        key: index of the group, 0 to 2^32 - 1.
        step: number of the step, 0 to 2^32 - 1.
        bfloat16: round to bfloat16 (nearest-even), which takes half or a quarter of the bytes.

    Raises:
        TypeError: another dtype, or ``key`` or ``step`` is not an int.
        ValueError: not contiguous, not on the CPU, or ``key`` or ``step`` is out of range.
    """
    check_range("key", key, 0, 2**32 - 1)
    check_range("step", step, 0, 2**32 - 1)
    return _core.dense(values, "bfloat16" if bfloat16 else "", key, step)


def max_message_bytes(numel: int, dense: bool = False, dtype: str = "float32") -> int:
    """Return the largest size in bytes of a message of ``numel`` elements, whatever the data.

    Args:
        numel: elements, at most 2^48.
        dense: False for the ceiling of a ternary message, 48 + ceil(0.22 * numel); True for a dense message.
        dtype: dtype of a dense message: "float32", "float64" or "bfloat16".

    Raises:
        ValueError: ``numel`` or ``dtype`` is out of range.
        TypeError: ``numel`` is not an int, or ``dense`` neither True nor False.

    >>> max_message_bytes(1_000_000)
    220048
    """
    if dtype not in ("float32", "float64", "bfloat16"):
        raise ValueError(f'dtype must be "float32", "float64" or "bfloat16", got {dtype!r}')
    check_range("numel", numel, 0, 2**48)
    return _core.max_message_bytes(numel, check_flag("dense", dense), dtype)


def _number(name: str, value: Any) -> float:
    """Return a number, which may be in an array without dimensions, as a float.

    Raises:
        TypeError: it is no number.
        ValueError: no float is as large.
    """
    number = None
    try:
        if hasattr(value, "__float__"):  # no text, though it may become a float
            number = float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large for a float, must be finite") from None
    except (TypeError, ValueError):
        pass
    if number is None:
        raise TypeError(f"{name} must be a number, got {reprlib.repr(value)}")
    return number


_encode_entries = Message.from_entries


def _from_entries(
    positions: Any,
    negative: Any,
    *,
    numel: int,
    threshold: float,
    key: int = 0,
    step: int = 0,
    shakeup: bool = False,
) -> Message:
    """Return the ternary message that changes the given elements.

    Args:
        positions: int64[count], ascending.
        negative: bool[count], true for minus.
        numel: elements of the update, at most 2^48.
        threshold: a positive bfloat16 value.
        key: index of the group, 0 to 2^32 - 1.
        step: number of the step, 0 to 2^32 - 1.
        shakeup: whether it is a shake-up.

    Raises:
        MessageError: the threshold is not a positive bfloat16 value.
        ValueError: positions are not ascending or outside [0, numel), or a number is out of range.
        TypeError: an argument is of the wrong kind.
    """
    for name, array, dtype in (("positions", positions, "int64"), ("negative", negative, "bool")):
        own = np.asarray(array).dtype
        if not np.can_cast(own, dtype):
            raise TypeError(f"{name} must be {dtype}[count], got {own}")
    return _encode_entries(
        positions,
        negative,
        numel=check_range("numel", numel, 0, 2**48),
        threshold=_number("threshold", threshold),
        key=check_range("key", key, 0, 2**32 - 1),
        step=check_range("step", step, 0, 2**32 - 1),
        shakeup=check_flag("shakeup", shakeup),
    )


# The compiled function says of a wrong argument only that it is incompatible.
Message.from_entries = staticmethod(_from_entries)  # type: ignore[method-assign]


def _on_host(message: Any) -> Message:
    """Return a message in host memory: the message itself, a view of its pinned copy, or a copy."""
    if isinstance(message, Message):
        return message
    if hasattr(message, "check"):
        message.check()  # raises the reason of a refusal; the buffer protocol would raise a BufferError
    try:
        return Message.parse(message)
    except TypeError:
        raise TypeError(
            f"a message must be a Message or its bytes, got {reprlib.repr(message)}"
        ) from None


# The copies of host messages in device memory, by the id of the message, device and stream, as long as the message
# lives: a message may be added to several targets.
_UPLOADED: dict[tuple[int, int, int], Any] = {}


def _uploaded(message: Any, numel: int, device: int, stream: int) -> Any:
    """Return a copy of a message in device memory, made on torch's current stream.

    A message of another size is returned as it is: ``apply_many`` refuses it.
    """
    if not isinstance(message, Message) or message.numel != numel:
        return message
    key = (id(message), device, stream)
    if key not in _UPLOADED:
        host = sys.modules["torch"].empty(message.nbytes, dtype=sys.modules["torch"].uint8)
        host.numpy()[:] = memoryview(message)
        _UPLOADED[key] = cuda_core().CudaMessage.at(host.cuda(device))
        weakref.finalize(message, _UPLOADED.pop, key, None).atexit = False
    return _UPLOADED[key]
