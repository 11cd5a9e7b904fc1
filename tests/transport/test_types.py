"""The types of the public interface: addresses, limits, buffers."""

from __future__ import annotations

import numpy as np
import pytest

from gradwire.transport import Limits
from gradwire.transport.addressing import format_address, parse_address
from gradwire.transport.types import flat_view


@pytest.mark.parametrize("text", ["10.0.0.1:5", "[fd00::1]:5", "host:0"])
def test_addresses_survive_parsing_and_formatting(text: str) -> None:
    assert format_address(parse_address(text)) == text


@pytest.mark.parametrize(
    "text", ["", "10.0.0.1", "host:", "host:x", "host:65536", "fd00::1:5", "host:-1"]
)
def test_malformed_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"address|host"):
        parse_address(text)


@pytest.mark.parametrize("name", ["window_bytes", "lag_s", "heartbeat_s"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_limits_without_which_nothing_moves_are_refused(name: str, value: float) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"{name} is|integer"):
        Limits(**{name: value})  # type: ignore[arg-type]


def test_limits_in_bytes_are_whole_numbers() -> None:
    with pytest.raises(TypeError, match="integer"):
        Limits(datagram_bytes=1200.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "limits",
    [
        {"datagram_bytes": 271},
        {"datagram_bytes": 9_017},
        {"message_bytes_max": 0},
        {"message_bytes_max": (256 << 20) + 1},
        {"message_bytes_max": 1 << 20, "send_log_bytes": (2 << 20) - 1},
        {"message_bytes_max": 1 << 20, "receive_bytes": (2 << 20) - 1},
        {"heartbeat_s": 2.0, "down_s": 10.0},
    ],
)
def test_limits_that_are_out_of_range_or_contradict_each_other_are_refused(
    limits: dict[str, int],
) -> None:
    with pytest.raises(
        ValueError, match=rf"{'down_s' if 'down_s' in limits else list(limits)[-1]} is"
    ):
        Limits(**limits)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "buffer",
    [
        b"123456",
        bytearray(b"123456"),
        memoryview(b"0123456")[1:],
        np.frombuffer(b"123456", dtype=np.uint16).reshape(3, 1),
    ],
)
def test_any_contiguous_buffer_becomes_flat_bytes_without_a_copy(buffer: object) -> None:
    view = flat_view(buffer)
    assert (view.ndim, view.format, bytes(view)) == (1, "B", b"123456")
    assert np.shares_memory(np.asarray(view), np.frombuffer(buffer, dtype=np.uint8))  # type: ignore[call-overload]


def test_an_empty_buffer_of_any_shape_becomes_no_bytes() -> None:
    assert bytes(flat_view(np.empty((0, 5), dtype=np.float64))) == b""


def test_a_buffer_that_is_not_contiguous_is_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match="ascontiguousarray"):
        flat_view(np.zeros((10, 10))[:, ::2])
