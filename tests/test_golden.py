"""Golden files hold the three definitions of the message format together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire import reference
from gradwire.errors import MessageError

GOLDEN = Path(__file__).parent / "golden"
VALID = sorted(path.stem for path in (GOLDEN / "valid").glob("*.bin"))
INVALID = sorted(path.stem for path in (GOLDEN / "invalid").glob("*.bin"))


def load(folder: str, name: str) -> tuple[bytes, dict[str, Any]]:
    """Return a golden message and its description."""
    path = GOLDEN / folder / name
    return path.with_suffix(".bin").read_bytes(), json.loads(path.with_suffix(".json").read_text())


def entries_of(about: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and signs from the one-based list of a description."""
    numbers = np.array(about["entries_one_based"], dtype=np.int64)
    return np.abs(numbers) - 1, numbers < 0


def test_there_are_golden_messages_of_both_sorts() -> None:
    assert len(VALID) >= 30
    assert len(INVALID) >= 45


@pytest.mark.parametrize("name", VALID)
def test_reference_reads_a_golden_message_as_described(name: str) -> None:
    data, about = load("valid", name)
    message = reference.parse(data)
    assert message.kind == about["kind"]
    assert message.header.numel == about["numel"]
    assert (message.header.key, message.header.step) == (about["key"], about["step"])
    if about["kind"] == "dense":
        expected = np.array(about["values"])
        assert message.values.astype(np.float64).tobytes() == expected.tobytes()
        return
    assert message.header.threshold == about["threshold"]
    assert message.header.flags == about["shakeup"]
    shapes = [(c.changed, c.unchanged, c.inverted, c.k) for c in message.chunks]
    assert shapes == [tuple(chunk.values()) for chunk in about["chunks"]]
    positions, negative = entries_of(about)
    np.testing.assert_array_equal(message.positions, positions)
    np.testing.assert_array_equal(message.negative, negative)


@pytest.mark.parametrize("name", VALID)
def test_reference_writes_a_golden_message_byte_for_byte(name: str) -> None:
    data, about = load("valid", name)
    header = {"key": about["key"], "step": about["step"]}
    if about["kind"] == "dense":
        values = np.array(about["values"])
        if about["dtype"] == "bfloat16":
            bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            assert reference.encode_dense(bits, **header) == data
        else:
            assert reference.encode_dense(values.astype(about["dtype"]), **header) == data
        return
    written = reference.encode_ternary(
        *entries_of(about),
        numel=about["numel"],
        threshold=about["threshold"],
        flags=int(about["shakeup"]),
        **header,
    )
    assert written == data


@pytest.mark.parametrize("name", INVALID)
def test_reference_refuses_an_invalid_golden_message_for_its_own_rule(name: str) -> None:
    data, about = load("invalid", name)
    with pytest.raises(MessageError) as caught:
        reference.parse(data)
    assert about["reference_error"] in str(caught.value)


@pytest.mark.parametrize("name", [n for n in INVALID if n not in ("crc", "empty", "header-cut")])
def test_an_invalid_golden_message_has_a_correct_crc(name: str) -> None:
    data, _ = load("invalid", name)
    header = reference.Header.unpack(data)
    payload = data[reference.HEADER_BYTES :]
    if name in ("payload-cut", "payload-cut-dense"):
        payload += b"\0" * (header.payload_bytes - len(payload))
        assert len(payload) == header.payload_bytes
        return
    payload = payload[: header.payload_bytes]
    assert reference.seal(header, payload) == data[: reference.HEADER_BYTES] + payload


@pytest.mark.parametrize("name", VALID)
def test_core_reads_and_writes_a_golden_message(name: str) -> None:
    data, about = load("valid", name)
    message = gw.Message.parse(data)
    assert bytes(message) == data
    assert (message.kind, message.numel) == (about["kind"], about["numel"])
    assert (message.key, message.step) == (about["key"], about["step"])
    if about["kind"] == "dense":
        values = gw.decode(message)
        assert values.astype(np.float64).tobytes() == np.array(about["values"]).tobytes()
        if about["dtype"] != "bfloat16":
            written = gw.dense_message(
                values.astype(about["dtype"]), key=about["key"], step=about["step"]
            )
            assert bytes(written) == data
        return
    assert (message.threshold, message.is_shakeup) == (about["threshold"], about["shakeup"])
    positions, negative = entries_of(about)
    ours = message.entries()
    np.testing.assert_array_equal(ours[0], positions)
    np.testing.assert_array_equal(ours[1], negative)
    written = gw.Message.from_entries(
        positions,
        negative,
        numel=about["numel"],
        threshold=about["threshold"],
        key=about["key"],
        step=about["step"],
        shakeup=about["shakeup"],
    )
    assert bytes(written) == data


@pytest.mark.parametrize("name", INVALID)
def test_core_refuses_an_invalid_golden_message(name: str) -> None:
    data, _ = load("invalid", name)
    with pytest.raises(MessageError):
        gw.Message.parse(data)
    if data and name != "trailing-byte":
        with pytest.raises(MessageError):
            gw.parse_many(data)
