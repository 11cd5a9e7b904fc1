"""Arrays on the emulated device, with the part of torch's interface that the GPU tests use.

Memory and streams belong to the emulated runtime: operations are enqueued on the current stream, and reading an array
waits for them.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.machinery
import importlib.util
import itertools
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import gradwire
from gradwire import arrays

DLPACK_CUDA = 2
NON_BLOCKING = 1
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
INTERFACE_TYPES = {
    torch.float32: "<f4",
    torch.float64: "<f8",
    torch.float16: "<f2",
    torch.uint8: "|u1",
}


class Runtime:
    """The emulated CUDA runtime in the module; errors are raised by name."""

    def __init__(self, module: Path) -> None:
        self._library = ctypes.CDLL(str(module))
        self._library.cudaGetErrorName.restype = ctypes.c_char_p
        self._library.emulatedWaits.restype = ctypes.c_uint64
        self._library.emulatedCopiedBytes.restype = ctypes.c_uint64
        self.copied_bytes = 0  # by tensors
        self._work: dict[int, Callable[[], object]] = {}
        self._numbers = itertools.count(1)
        self._run = HOST_FUNCTION(self._run_work)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the runtime."""
        error = getattr(self._library, name)(*arguments)
        if error:
            self._library.cudaGetLastError()
            raise RuntimeError(f"{name}: {self._library.cudaGetErrorName(error).decode()}")

    def make(self, name: str, *arguments: Any) -> int:
        """Call a function with a pointer as its result, and return the pointer."""
        made = ctypes.c_void_p()
        self.call(name, ctypes.byref(made), *arguments)
        assert made.value is not None
        return made.value

    def waits(self) -> int:
        """Return how often the host has waited for the device."""
        return int(self._library.emulatedWaits())

    def pcie_bytes(self) -> int:
        """Return the bytes copied between host and device so far, except what kernels write to pinned memory."""
        return self.copied_bytes + int(self._library.emulatedCopiedBytes())

    def enqueue(self, work: Callable[[], object], stream: int) -> None:
        """Enqueue ``work`` on a stream."""
        is_captured = ctypes.c_int()
        self.call("cudaStreamIsCapturing", ctypes.c_void_p(stream), ctypes.byref(is_captured))
        number = next(self._numbers) * (-1 if is_captured.value else 1)
        self._work[number] = work
        self.call("cudaLaunchHostFunc", ctypes.c_void_p(stream), self._run, ctypes.c_void_p(number))

    def _run_work(self, word: int) -> None:
        number = ctypes.c_int64(word).value
        # A graph may run its work again; other work is released after it has run.
        (self._work[number] if number < 0 else self._work.pop(number))()


class Stream:
    """A stream of the emulated device; None creates a new one."""

    def __init__(self, handle: int | None = None) -> None:
        self.cuda_stream = (
            RUNTIME.make("cudaStreamCreateWithFlags", NON_BLOCKING) if handle is None else handle
        )

    def synchronize(self) -> None:
        RUNTIME.call("cudaStreamSynchronize", ctypes.c_void_p(self.cuda_stream))

    def query(self) -> bool:
        """Return whether all work is done, by an event as in torch."""
        event = Event()
        event.record(self)
        return event.query()


class Event:
    """An event of the emulated device."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p(RUNTIME.make("cudaEventCreateWithFlags", 0))

    def record(self, stream: Stream | None = None) -> None:
        on = current() if stream is None else stream.cuda_stream
        RUNTIME.call("cudaEventRecord", self._handle, ctypes.c_void_p(on))

    def wait(self, stream: Stream) -> None:
        """Make the stream wait for the event."""
        RUNTIME.call("cudaStreamWaitEvent", ctypes.c_void_p(stream.cuda_stream), self._handle, 0)

    def query(self) -> bool:
        try:
            RUNTIME.call("cudaEventQuery", self._handle)
        except RuntimeError as error:
            if "NotReady" not in str(error):
                raise
            return False
        return True


CURRENT: list[int] = [0]


def current() -> int:
    """Return the stream that operations are enqueued on."""
    return CURRENT[-1]


def current_stream(device: int = 0) -> Stream:
    """Return the current stream as an object."""
    assert device == 0
    return Stream(current())


@contextmanager
def stream_context(stream: Stream) -> Iterator[None]:
    """Enqueue the operations inside on this stream."""
    CURRENT.append(stream.cuda_stream)
    yield
    CURRENT.pop()


# Free addresses by size and stream.
FREE_MEMORY: dict[tuple[int, int], list[int]] = defaultdict(list)


class Memory:
    """A piece of device memory. As in torch, it is reused once no tensor refers to it, even if work is pending."""

    def __init__(self, nbytes: int) -> None:
        free = FREE_MEMORY[nbytes, current()]
        self.address = free.pop() if free else RUNTIME.make("cudaMalloc", ctypes.c_size_t(nbytes))
        weakref.finalize(self, free.append, self.address)


class Tensor:
    """An array on the emulated device."""

    __module__ = "torch"  # makes gradwire use torch's current stream

    def __init__(self, memory: Any, view: torch.Tensor, changes: list[int] | None = None) -> None:
        self._memory = memory
        self._changes = changes or [0]  # counted as torch does, when they are enqueued
        self._view = view  # only work on a stream may read it

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._view.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self._view.dtype

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def _version(self) -> int:
        return self._changes[0]

    def numel(self) -> int:
        return self._view.numel()

    def data_ptr(self) -> int:
        return self._view.data_ptr()

    def __getitem__(self, key: Any) -> Tensor:
        return Tensor(self._memory, self._view[key], self._changes)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._do(torch.Tensor.__setitem__, key, value)

    def __getattr__(self, name: str) -> Any:
        """Return another method of tensors, or what is known of a tensor without its values."""
        if name.startswith("_") or name in ("numpy", "to_local"):
            raise AttributeError(name)  # as for a tensor on a GPU
        if not callable(getattr(self._view, name)):
            return getattr(self._view, name)
        method = getattr(torch.Tensor, name)
        if name.endswith("_"):
            return partial(self._do, method)
        return partial(computed, method, self)

    @classmethod
    def __torch_function__(
        cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return computed(function, *args, **(kwargs or {}))

    def __iadd__(self, other: Any) -> Tensor:
        return self._do(torch.Tensor.add_, other)

    def __imul__(self, other: Any) -> Tensor:
        return self._do(torch.Tensor.mul_, other)

    def __add__(self, other: Any) -> Tensor:
        return self.clone().add_(other)

    def __sub__(self, other: Any) -> Tensor:
        return self.clone().sub_(other)

    def __ne__(self, other: object) -> Any:
        return computed(torch.Tensor.__ne__, self, other)

    def __eq__(self, other: object) -> Any:
        return computed(torch.Tensor.__eq__, self, other)

    def __and__(self, other: Any) -> Any:
        return computed(torch.Tensor.__and__, self, other)

    def __or__(self, other: Any) -> Any:
        return computed(torch.Tensor.__or__, self, other)

    def __bool__(self) -> bool:
        return bool(self.cpu())

    __hash__ = object.__hash__

    def clone(self) -> Tensor:
        return empty(*self.shape, dtype=self.dtype).copy_(self)

    def new_empty(self, shape: Any, *, dtype: torch.dtype, device: Any, pin_memory: bool) -> Tensor:
        assert (str(device), pin_memory) == ("cuda:0", False)
        return empty(*shape, dtype=dtype)

    def new_zeros(self, shape: tuple[int, ...]) -> Tensor:
        return empty(*shape, dtype=self.dtype).zero_()

    def to(self, *to: Any, copy: bool = False) -> Any:
        """Return a tensor of another dtype, or a copy in host memory."""
        if any(str(one) == "cpu" for one in to):
            return self.cpu()
        dtype = next((one for one in to if isinstance(one, torch.dtype)), self.dtype)
        is_same = dtype == self.dtype and not copy
        return self if is_same else empty(*self.shape, dtype=dtype).copy_(self)

    def float(self) -> Tensor:
        return self.to(torch.float32)

    def double(self) -> Tensor:
        return self.to(torch.float64)

    def int(self) -> Tensor:
        return self.to(torch.int32)

    def cpu(self) -> torch.Tensor:
        """Return a copy in host memory; waits for the stream."""
        result = torch.empty(self.shape, dtype=self.dtype)
        RUNTIME.copied_bytes += result.nbytes
        RUNTIME.enqueue(partial(result.copy_, self._view), current())
        RUNTIME.call("cudaStreamSynchronize", ctypes.c_void_p(current()))
        return result

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def item(self) -> Any:
        return self.cpu().item()

    def any(self) -> bool:
        return bool(self.cpu().any())

    def sum(self, **options: Any) -> Tensor:
        return computed(torch.Tensor.sum, self, **options)

    def _do(self, work: Callable[..., object], *operands: Any, **options: Any) -> Tensor:
        """Enqueue work on this array; pending work does not keep device memory from being reused."""
        found = [one.clone() if isinstance(one, torch.Tensor) else host_of(one) for one in operands]
        RUNTIME.copied_bytes += sum(one.nbytes for one in operands if isinstance(one, torch.Tensor))
        RUNTIME.enqueue(partial(work, self._view, *found, **options), current())
        self._changes[0] += 1
        return self

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        size = self._view.element_size()
        return {
            "shape": self.shape,
            "typestr": INTERFACE_TYPES[self.dtype],
            "data": (self.data_ptr(), False),
            "strides": None
            if self._view.is_contiguous()
            else tuple(stride * size for stride in self._view.stride()),
            "version": 3,
            "stream": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return DLPACK_CUDA, 0

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        """Return the capsule of a tensor on the CPU with another device in it."""
        if stream is not None and stream > 2 and stream != current():
            event = Event()
            event.record()
            event.wait(Stream(stream))
        capsule = self._view.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = DLPACK_CUDA
        return capsule


def host_of(value: Any) -> Any:
    """Return the views of tensors on the device for work on a stream; return other values unchanged."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(host_of, value))
    return value._view if isinstance(value, Tensor) else value


def computed(function: Callable[..., Any], *operands: Any, **options: Any) -> Any:
    """Return what a function computes on the device, as tensors there; waits, and copies nothing to the host."""
    RUNTIME.call("cudaStreamSynchronize", ctypes.c_void_p(current()))
    first = next((one for one in operands if isinstance(one, Tensor)), None)
    out = options.pop("out", None)
    result = function(*map(host_of, operands), **options)
    if out is not None:
        return out.copy_(upload(result, is_counted=False))

    def placed(one: Any) -> Any:
        if isinstance(one, (list, tuple)):
            return type(one)(map(placed, one))
        if not isinstance(one, torch.Tensor):
            return one
        if first is not None and shares(one, first._view):
            return Tensor(first._memory, one)
        return upload(one, is_counted=False)

    return placed(result)


def shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def view_of(address: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    if nbytes == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=dtype)


def empty(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cuda") -> Tensor:
    assert device == "cuda"
    size = torch.Size(shape)
    memory = Memory(max(1, size.numel()) * dtype.itemsize)
    return Tensor(memory, view_of(memory.address, size.numel() * dtype.itemsize, dtype).view(size))


def full(
    shape: tuple[int, ...], value: Any, *, dtype: torch.dtype = torch.float32, device: str = "cuda"
) -> Tensor:
    return empty(*shape, dtype=dtype, device=device).fill_(value)


def upload(tensor: torch.Tensor, _device: Any = None, *, is_counted: bool = True) -> Tensor:
    before = RUNTIME.copied_bytes
    made = empty(*tensor.shape, dtype=tensor.dtype).copy_(tensor)
    if not is_counted:
        RUNTIME.copied_bytes = before
    return made


def as_tensor(array: Any, device: Any = "cuda") -> Tensor:
    """Return a tensor that shares the memory of an array of gradwire."""
    assert str(device).startswith("cuda")
    interface = array.__cuda_array_interface__
    dtype = {typestr: dtype for dtype, typestr in INTERFACE_TYPES.items()}[interface["typestr"]]
    (numel,) = interface["shape"]
    return Tensor(array, view_of(interface["data"][0], numel * dtype.itemsize, dtype))


def cat(parts: list[Tensor]) -> Tensor:
    """Return the concatenation of tensors."""
    result = empty(sum(part.numel() for part in parts), dtype=parts[0].dtype)
    begin = 0
    for part in parts:
        result[begin : begin + part.numel()].copy_(part)
        begin += part.numel()
    return result


class Graph:
    """A captured graph."""

    def __init__(self) -> None:
        self._handle: int | None = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        stream = Stream()
        on = ctypes.c_void_p(stream.cuda_stream)
        RUNTIME.call("cudaStreamBeginCapture", on, 0)
        with stream_context(stream):
            yield
        made = ctypes.c_void_p()
        RUNTIME.call("cudaStreamEndCapture", on, ctypes.byref(made))
        self._handle = made.value

    def replay(self) -> None:
        RUNTIME.call(
            "emulatedGraphLaunch", ctypes.c_void_p(self._handle), ctypes.c_void_p(current())
        )


def synchronize() -> None:
    RUNTIME.call("cudaDeviceSynchronize")


def install(module: Path, seed: int) -> None:
    """Install the emulated module in the place of the compiled one."""
    global RUNTIME
    name = "gradwire._cuda"
    loader = importlib.machinery.ExtensionFileLoader(name, str(module))
    spec = importlib.util.spec_from_file_location(name, module, loader=loader)
    assert spec is not None
    sys.modules[name] = loaded = importlib.util.module_from_spec(spec)
    loader.exec_module(loaded)
    gradwire._cuda = loaded  # type: ignore[attr-defined]
    arrays.cuda_problem.cache_clear()
    RUNTIME = Runtime(module)
    # In the middle of a stream's work a collection would run destructors that wait for the stream, so that later work
    # would come first. CUDA forbids host functions such calls; here the tests collect garbage when they end.
    gc.disable()
    gc.freeze()  # what is imported lives on, and is not looked through again
    RUNTIME.call("emulatedSeed", ctypes.c_uint64(seed))
    torch.Tensor.cuda = upload  # type: ignore[method-assign,assignment]
    torch.cuda.current_stream = current_stream  # type: ignore[assignment]
    torch.cuda.is_initialized = lambda: True
    on_host = torch.as_tensor

    def as_tensor_anywhere(array: Any, *args: Any, **options: Any) -> Any:
        if hasattr(array, "__cuda_array_interface__"):
            return as_tensor(array, options.get("device", "cuda"))
        return on_host(array, *args, **options)

    torch.as_tensor = as_tensor_anywhere  # type: ignore[assignment]
    zeros_on_host = torch.zeros

    def zeros_anywhere(*shape: Any, **options: Any) -> Any:
        if str(options.get("device", "cpu")).startswith("cuda"):
            return empty(*shape, dtype=options["dtype"]).zero_()
        return zeros_on_host(*shape, **options)

    torch.zeros = zeros_anywhere


RUNTIME: Runtime

TORCH = SimpleNamespace(
    **{
        name: getattr(torch, name)
        for name in ("bfloat16", "float16", "float32", "float64", "uint8", "from_numpy")
    },
    empty=empty,
    full=full,
    zeros=lambda *shape, **options: empty(*shape, **options).zero_(),
    ones=lambda *shape, **options: empty(*shape, **options).fill_(1),
    cat=cat,
    as_tensor=as_tensor,
    from_dlpack=as_tensor,
    cuda=SimpleNamespace(
        Stream=Stream,
        Event=Event,
        stream=stream_context,
        synchronize=synchronize,
        current_stream=current_stream,
        CUDAGraph=Graph,
        graph=Graph.capture,
        _sleep=lambda _: RUNTIME.call("emulatedSleep", ctypes.c_void_p(current())),
    ),
)
