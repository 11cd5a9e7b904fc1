"""Arrays of every library: their devices and streams, views of their memory, copies and sums."""

from __future__ import annotations

import importlib
import importlib.util
import math
import reprlib
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import BackendUnavailable

__all__ = [
    "Arrays",
    "add",
    "add_finite",
    "blocks",
    "check_arrays",
    "check_dtypes",
    "check_order",
    "copies",
    "cuda_core",
    "cuda_problem",
    "device_of",
    "difference",
    "layouts",
    "nonfinite",
    "on_host",
    "placed",
    "put",
    "sampled",
    "scaled",
    "stream_of",
    "views",
    "writable_views",
    "zeros_like",
]

Arrays: TypeAlias = list[NDArray[Any]]

_DLPACK_CUDA = (2, 13)

# Elements of a sample that tells whether arrays have changed, and how many are side by side: a cache line of float32.
_SAMPLE_NUMEL = 1 << 18
_SIDE_BY_SIDE = 16

# Elements that are passed over together: they stay in a processor's cache, of which several arrays have a part. A
# multiple of four, for `ulps.pack`.
_BLOCK_NUMEL = 1 << 15


@lru_cache(maxsize=1)
def cuda_problem() -> str:
    """Return why the CUDA backend is not usable here, or an empty string.

    The answer of the driver is kept for the life of the process.
    """
    try:
        core = importlib.import_module("gradwire._cuda")
    except ImportError as error:
        from . import _core

        if importlib.util.find_spec("gradwire._cuda") is None:
            return f"this build has no CUDA backend ({_core.cuda_status()})"
        return f"the CUDA module does not load: {error}"
    return str(core.unusable())


def cuda_core() -> Any:
    """Return the module ``gradwire._cuda``.

    Raises:
        BackendUnavailable: this build has no such module, or there is no driver or GPU.
    """
    problem = cuda_problem()
    if problem:
        raise BackendUnavailable(f'{problem}; use device="cpu" and arrays on the CPU')
    return importlib.import_module("gradwire._cuda")


def device_of(arrays: Any) -> int:
    """Return the number of the CUDA device of an array, or of the first of a sequence; -1 for the CPU."""
    if isinstance(arrays, np.ndarray):
        return -1
    if isinstance(arrays, (list, tuple)):
        return device_of(arrays[0]) if arrays else -1
    if getattr(arrays, "is_cuda", False):  # torch's, much sooner than by the protocol
        return int(arrays.device.index)
    if hasattr(arrays, "__dlpack_device__"):
        kind, number = arrays.__dlpack_device__()
        return int(number) if kind in _DLPACK_CUDA else -1
    if hasattr(arrays, "__cuda_array_interface__"):
        return int(cuda_core().device_of(arrays))
    return -1


def stream_of(stream: Any, arrays: Any, device: int) -> int:
    """Return the handle of the stream for work on some arrays.

    Args:
        stream: an int (0 and 1 are the legacy default stream, 2 the per-thread default stream), a
            ``torch.cuda.Stream``, a ``cupy.cuda.Stream``, or an object with ``__cuda_stream__``. None stands for the
            current stream of torch or CuPy if the arrays are theirs, for gradwire's own memory of torch if torch uses
            the device, otherwise for the default stream.
        arrays: one array or a sequence of arrays; may be None.
        device: the number of their device.

    Raises:
        TypeError: ``stream`` is of another type.
    """
    if stream is None:
        return _current_stream(arrays, device)
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    for attribute in ("cuda_stream", "ptr"):  # torch, CuPy
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    raise TypeError(
        f"stream must be an int, a torch or CuPy stream or have __cuda_stream__, got {reprlib.repr(stream)}"
    )


def _current_stream(arrays: Any, device: int) -> int:
    first = arrays[0] if isinstance(arrays, Sequence) and len(arrays) > 0 else arrays
    library = type(first).__module__.split(".")[0]
    torch = sys.modules.get("torch")
    is_own = first is None or library == "gradwire"
    if library == "torch" or (is_own and torch is not None and torch.cuda.is_initialized()):
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    if library == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device):
            return int(cupy.cuda.get_current_stream().ptr)
    return 0


# ---- arrays as NumPy sees them, or torch's tensors on a device -------------------------------------------------------


def check_arrays(arrays: Sequence[Any]) -> None:
    """Raise `TypeError` unless there are arrays, and nothing else, in a list that a caller has given."""
    strange = [
        array for array in arrays if not (hasattr(array, "dtype") and hasattr(array, "shape"))
    ]
    if strange or not arrays:
        raise TypeError(
            "params must be an array or a list of arrays, and "
            f"{f'one is a {type(strange[0]).__name__}' if strange else 'the list is empty'}: of a model, pass "
            "list(model.parameters()), of a dict list(params.values()), in the same order on all nodes"
        )


def views(arrays: Any) -> Arrays:
    """Return each array as NumPy sees it, without a copy; torch's tensors on a device as they are.

    Args:
        arrays: one array, or a list or tuple: ndarrays, buffers, CPU tensors with ``numpy``, or torch's on a device.

    Raises:
        TypeError: NumPy cannot view an array in place.
        ValueError: a tensor requires grad.
    """
    return [_view(array) for array in _listed(arrays)]


def writable_views(arrays: Any) -> Arrays:
    """Return each array as ``views`` does, checked to be float32 or float64, contiguous and writable.

    Raises:
        TypeError: another dtype, or NumPy cannot view an array in place.
        ValueError: an array is read-only or not C-contiguous.
    """
    viewed = views(arrays)
    for array in viewed:
        dtype = _dtype_name(array)
        if dtype not in ("float32", "float64"):
            raise TypeError(f"parameters must be float32 or float64, got {dtype}")
        if isinstance(array, np.ndarray):
            is_usable = array.flags.c_contiguous and array.flags.writeable
        else:
            is_usable = array.is_contiguous()
        if not is_usable:
            raise ValueError("parameters must be C-contiguous and writable")
    return viewed


def layouts(arrays: Any) -> list[list[Any]]:
    """Return [dtype, shape] of each array, as JSON values; the arrays may be on a device."""
    described = []
    for array in _listed(arrays):
        viewed = array if hasattr(array, "dtype") and hasattr(array, "shape") else _view(array)
        described.append([_dtype_name(viewed), list(viewed.shape)])
    return described


def on_host(array: Any) -> NDArray[Any]:
    """Return an array itself, or a copy in host memory of a tensor on a device."""
    if isinstance(array, np.ndarray):
        return array
    host: NDArray[Any] = array.cpu().numpy()
    return host


def sampled(arrays: Sequence[Any]) -> list[Any]:
    """Return views of some elements of each flat array: all elements of small models, about 262,144 of large ones.

    Single elements, each of another cache line, would take as long as a twelfth of a step.
    """
    times = (sum(math.prod(array.shape) for array in arrays) // _SAMPLE_NUMEL) | 1
    if times == 1:
        return list(arrays)
    span = times * _SIDE_BY_SIDE
    samples = []
    for array in arrays:
        whole = math.prod(array.shape) // span * span
        rows = array[:whole].reshape(-1, span) if whole else array.reshape(1, -1)
        samples.append(rows[:, :_SIDE_BY_SIDE])
    return samples


def copies(arrays: Sequence[NDArray[Any]]) -> Arrays:
    """Return a contiguous copy of each array, in host memory."""
    return [np.array(on_host(array), order="C") for array in arrays]


def blocks(*arrays: NDArray[Any]) -> Iterator[Arrays]:
    """Yield the elements of arrays of one size block by block; written into where an array is contiguous.

    New memory of an array's size, as a formula of whole arrays takes for every operation, costs more than the formula.
    """
    flat = [array.reshape(-1) for array in arrays]
    for begin in range(0, flat[0].size, _BLOCK_NUMEL):
        yield [array[begin : begin + _BLOCK_NUMEL] for array in flat]


def nonfinite(arrays: Sequence[Any]) -> int:
    """Return how many elements of arrays in host memory are NaN or infinite."""
    # Nearly always there are none, and the sums say so in little more than half the time.
    with np.errstate(over="ignore", invalid="ignore"):
        doubtful = [array for array in arrays if not np.isfinite(array.sum())]
    return sum(
        block.size - np.count_nonzero(np.isfinite(block))
        for array in doubtful
        for (block,) in blocks(array)
    )


def zeros_like(arrays: Sequence[Any]) -> Arrays:
    """Return zeros of the shape and dtype of each array, in the memory where the array is."""
    return [
        np.zeros_like(array) if isinstance(array, np.ndarray) else array.new_zeros(array.shape)
        for array in arrays
    ]


def put(target: Sequence[NDArray[Any]], source: Sequence[NDArray[Any]]) -> None:
    """Copy every array of ``source`` to its counterpart in ``target``, between host and device where they differ."""
    if _are_on_device(target, source):
        _in_one_launch("copy_", target, source)
        return
    for destination, origin in zip(target, source, strict=True):
        if isinstance(destination, np.ndarray):
            destination[...] = on_host(origin)
            continue
        tensor: Any = destination
        if isinstance(origin, np.ndarray):
            tensor.copy_(sys.modules["torch"].from_numpy(np.ascontiguousarray(origin)))
        else:
            tensor.copy_(origin)


def placed(arrays: Arrays, like: Any) -> Arrays:
    """Return the arrays themselves, or copies in the memory of other arrays if these are on a device."""
    others = views(like)
    if (device_of(arrays) < 0) == (device_of(others) < 0):
        return arrays
    moved = zeros_like(others)
    put(moved, arrays)
    return moved


def add(target: Sequence[NDArray[Any]], source: Sequence[NDArray[Any]]) -> None:
    """Add every array of ``source`` to its counterpart in ``target``.

    Raises:
        ValueError: the sizes differ; nothing was added.
    """
    shaped = _shaped(target, source)
    if _are_on_device(target, source):
        _in_one_launch("add_", target, shaped)
        return
    for destination, origin in zip(target, shaped, strict=True):
        destination += origin


def subtract(target: Sequence[NDArray[Any]], source: Sequence[NDArray[Any]]) -> None:
    """Subtract every array of ``source``, which has the same shape and device, from its counterpart in ``target``."""
    if _are_on_device(target, source):
        _in_one_launch("sub_", target, source)
        return
    for destination, origin in zip(target, source, strict=True):
        destination -= origin


def check_dtypes(params: Sequence[Any], update: Sequence[Any]) -> None:
    """Raise `TypeError` if the dtype of an array of an update cannot be added to the parameters without rounding it."""
    for array, origin in zip(params, update, strict=False):
        dtypes = _dtype_name(origin), _dtype_name(array)
        if dtypes[0] not in ("float32", "float16", "bfloat16", dtypes[1]):
            raise TypeError(
                f"an update of {dtypes[0]} for parameters of {dtypes[1]}: it would be rounded; pass {dtypes[1]}"
            )


def check_order(update: Any, params: Any) -> None:
    """Raise `ValueError` where an update has as many elements as the parameters, but transposed, or of other arrays."""
    arrays = [each if isinstance(each, (list, tuple)) else [each] for each in (update, params)]
    # The numbers of arrays and of elements are compared elsewhere.
    given, own = ([tuple(np.shape(array)) for array in each] for each in arrays)
    is_moved = len(given) == len(own) and sum(map(math.prod, given)) == sum(map(math.prod, own))
    for index, (there, here) in enumerate(zip(given, own, strict=False)):
        is_flat = min(len(here), len(there)) <= 1
        is_other = is_moved and math.prod(here) != math.prod(there)
        if here != there and (not is_flat or is_other):
            raise ValueError(
                f"array {index} of the update has shape {there}, the parameters' has {here}: give it that, or flat"
            )


def add_finite(
    target: Sequence[NDArray[Any]], source: Sequence[NDArray[Any]], factor: float = 1.0
) -> tuple[int, int]:
    """Add every array of ``source``, times a factor, to its counterpart in ``target``, but for NaN and infinity.

    On a device these are added, too: an encoder says so without a wait of its own.

    Args:
        target: float32 or float64, contiguous.
        source: float32 or float16, to float64 also float64; on a device bfloat16, too. Not modified.
        factor: of every value.

    Returns:
        How many values were left out, and the index of the first of them in all arrays; -1 if there is none.

    Raises:
        ValueError: the sizes or the devices differ; nothing was added.
        TypeError: values that would be rounded; nothing was added.
    """
    numbers = [device_of(list(arrays)) for arrays in (source, target)]
    if numbers[0] != numbers[1]:
        names = [f"on cuda:{number}" if number >= 0 else "in host memory" for number in numbers]
        raise ValueError(
            f"the update is {names[0]}, the parameters are {names[1]}: move one of both"
        )
    check_dtypes(target, source)
    shaped = _shaped(target, source)
    if _are_on_device(target, source):
        _in_one_launch("add_", target, shaped if factor == 1.0 else scaled(shaped, factor))
        return 0, -1
    left_out = 0
    first = -1
    start = 0
    for destination, origin in zip(target, shaped, strict=True):
        sums = destination.reshape(-1)
        values = origin.reshape(-1)
        weight = sums.dtype.type(factor)
        for begin in range(0, sums.size, _BLOCK_NUMEL):
            block = values[begin : begin + _BLOCK_NUMEL].astype(sums.dtype, copy=False)
            if factor != 1.0:
                block = block * weight
            part = sums[begin : begin + _BLOCK_NUMEL]
            with np.errstate(all="ignore"):
                is_finite = bool(np.isfinite(block.sum()))
            if is_finite:
                part += block
                continue
            # A sum of finite values may be too large as well.
            (places,) = np.nonzero(~np.isfinite(block))
            if places.size and first < 0:
                first = start + begin + int(places[0])
            left_out += places.size
            np.add(part, block, out=part, where=np.isfinite(block))
        start += sums.size
    return left_out, first


def _shaped(target: Sequence[Any], source: Sequence[Any]) -> list[Any]:
    """Return every array of ``source``, which may also be divided in another way, in the shape of its counterpart."""
    target_sizes = [math.prod(array.shape) for array in target]
    source_sizes = [math.prod(array.shape) for array in source]
    is_on_host = all(isinstance(array, np.ndarray) for array in source)
    if target_sizes != source_sizes and sum(target_sizes) == sum(source_sizes) and is_on_host:
        whole = np.concatenate([array.reshape(-1) for array in source])
        source = np.split(whole, np.cumsum(target_sizes[:-1]))
    elif target_sizes != source_sizes:
        raise ValueError(
            f"an update of arrays with {source_sizes} elements for parameters of {target_sizes}"
        )
    return [origin.reshape(array.shape) for array, origin in zip(target, source, strict=True)]


def difference(minuend: Sequence[NDArray[Any]], subtrahend: Sequence[NDArray[Any]]) -> Arrays:
    """Return the differences of all pairs of arrays, in new memory."""
    if _are_on_device(minuend, subtrahend):
        differences: Arrays = _in_one_launch("sub", minuend, subtrahend)
        return differences
    # Of arrays without dimensions NumPy returns numbers, which nothing can be added to in place.
    return [np.asarray(left - right) for left, right in zip(minuend, subtrahend, strict=True)]


def put_difference(
    target: Sequence[NDArray[Any]],
    minuend: Sequence[NDArray[Any]],
    subtrahend: Sequence[NDArray[Any]],
) -> None:
    """Set every array of ``target``, all on one device, to the difference of a pair, without other memory."""
    _in_one_launch("copy_", target, minuend)
    _in_one_launch("sub_", target, subtrahend)


def scaled(arrays: Any, factor: float) -> Any:
    """Return one array, or a list of arrays, times a factor, in new memory on the same device.

    Arrays of half precision become float32, so that the factor rounds nothing.
    """
    if isinstance(arrays, (list, tuple)):
        return [scaled(array, factor) for array in arrays]
    array = arrays if hasattr(arrays, "dtype") else _view(arrays)
    is_half = _dtype_name(array) in ("float16", "bfloat16")
    if hasattr(array, "detach"):  # torch's
        return (array.detach().float() if is_half else array.detach()) * factor
    return (array.astype("float32") if is_half else array) * factor


def _are_on_device(*lists: Sequence[Any]) -> bool:
    return all(device_of(list(arrays)) >= 0 for arrays in lists)


def _in_one_launch(operation: str, target: Sequence[Any], source: Sequence[Any]) -> Any:
    """Call an operation of torch on all pairs of tensors: a launch for each would take longer than a step's kernels."""
    call = getattr(sys.modules["torch"], f"_foreach_{operation}")
    return call(list(target), list(source)) if len(target) else []


def _listed(arrays: Any) -> list[Any]:
    return list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]


def _dtype_name(array: Any) -> str:
    return _name_of(array.dtype)


@lru_cache(maxsize=64)
def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _view(array: Any) -> NDArray[Any]:
    if type(array) is np.ndarray:  # a step passes over a model's arrays a dozen times
        return array
    if getattr(array, "requires_grad", False):
        raise ValueError(
            "a tensor that requires grad does not lend its memory: pass tensor.detach()"
        )
    if getattr(array, "is_cuda", False):
        tensor: NDArray[Any] = array
        return tensor
    # NumPy would copy one of its numbers.
    if hasattr(array, "__array_interface__") and not isinstance(array, np.generic):
        return np.asarray(array)
    try:
        return np.asarray(array.numpy() if hasattr(array, "numpy") else memoryview(array))
    except (TypeError, BufferError):  # the second is JAX's for bfloat16
        raise TypeError(
            f"{type(array).__name__} of {getattr(array, 'dtype', 'no dtype')} is not an array that NumPy can view in "
            "place; pass arrays in host memory, or torch's tensors, of a dtype that NumPy has"
        ) from None
