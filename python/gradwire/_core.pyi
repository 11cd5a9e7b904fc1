"""The compiled core, documented and used through ``gradwire``."""

from typing import Any

from numpy.typing import NDArray

Buffer = Any

class Message:
    """One encoded update: self-describing bytes, owned or a view of a received buffer. Supports the buffer protocol."""

    @staticmethod
    def parse(buffer: Buffer) -> Message:
        """Return the single message in ``buffer``, fully checked, without a copy."""
    @staticmethod
    def from_entries(
        positions: NDArray[Any],
        negative: NDArray[Any],
        *,
        numel: int,
        threshold: float,
        key: int = 0,
        step: int = 0,
        shakeup: bool = False,
    ) -> Message:
        """Return the ternary message that changes these elements."""
    def entries(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return int64[count] positions, ascending, and bool[count], true for minus."""
    @property
    def kind(self) -> str: ...
    @property
    def key(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def threshold(self) -> float: ...
    @property
    def is_shakeup(self) -> bool: ...
    @property
    def density(self) -> float: ...
    @property
    def nbytes(self) -> int: ...
    def __bytes__(self) -> bytes: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

def encode_into(residual: Any, update: Any, threshold: float, key: int, step: int) -> Message: ...
def parse_many(buffer: Buffer) -> list[Message]: ...
def view_message(buffer: Buffer) -> Message: ...
def apply_many(
    messages: list[Message], target: Any, scale: float, threads: int, part: Any
) -> None: ...
def apply_to_both(
    messages: list[Message], target: Any, second: Any, own: int, scale: float, threads: int
) -> None: ...
def apply_with_momentum(
    messages: list[Message],
    target: Any,
    velocity: Any,
    momentum: float,
    scale: float,
    second: Any,
    own: int,
    threads: int,
) -> None: ...
def decode(message: Message) -> NDArray[Any]: ...
def dense(values: Any, dtype: str, key: int, step: int) -> Message: ...
def add_moved(copies: Any, params: Any, threads: int) -> None:
    """Add to float32 ``copies`` what ``params``, in half precision, differ by from the copies rounded to their type."""

def round_copies(copies: Any, params: Any, threads: int) -> None:
    """Set ``params``, of bfloat16, to float32 ``copies``, rounded."""

def max_message_bytes(numel: int, dense: bool = False, dtype: str = "float32") -> int: ...
def usable_isas() -> list[str]: ...
def isa() -> str: ...
def select_isa(name: str) -> None: ...
def cuda_status() -> str: ...

class Encoder:
    def __init__(self, numel: int, float64: bool, threads: int) -> None: ...
    def encode(
        self,
        update: Any,
        before: Any,
        threshold: float,
        rounding_point: float,
        flags: int,
        key: int,
        step: int,
        skip_nonfinite: bool,
        partition: Any,
        max_bytes: int,
        most_changed: int,
        messages: list[Message],
    ) -> tuple[int, int]: ...
    def sample(
        self,
        update: Any,
        before: Any,
        threshold: float,
        rounding_point: float,
        density: float,
        turn: int,
    ) -> tuple[float, float, float, float, float, float, float]: ...
    def encode_dense(
        self,
        update: Any,
        before: Any,
        dtype: str,
        key: int,
        step: int,
        skip_nonfinite: bool,
        partition: Any,
        messages: list[Message],
    ) -> int: ...
    def check_update(self, update: Any) -> None: ...
    def clip(self, limit: float) -> None: ...
    def clipped(self) -> tuple[int, float]: ...
    def keep_residual(self) -> NDArray[Any]: ...
    def drop_residual(self) -> None: ...
