"""Untrusted bytes: every string parses or raises MessageError, and nobody reads it differently."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire as gw
from gradwire import reference
from gradwire.errors import MessageError

from .strategies import Changes, changes, thresholds

header_changes = st.fixed_dictionaries(
    {},
    optional={
        "kind": st.integers(0, 3),
        "flags": st.integers(0, 255),
        "exponent": st.integers(0, 20),
        "threshold_bits": st.integers(0, 0xFFFF),
        "dtype": st.integers(0, 4),
        "version": st.integers(0, 2),
        "reserved": st.integers(0, 1),
    },
)
sizes = st.one_of(st.integers(-3, 3), st.sampled_from([2**31, 2**47, 2**48, 2**63]))


def same_verdict(data: bytes) -> bool:
    """Parse with both codecs, require that they agree, and return whether the message is valid."""
    try:
        expected = reference.parse(data)
    except MessageError:
        with pytest.raises(MessageError):
            gw.Message.parse(data)
        with pytest.raises(MessageError):
            gw.parse_many(data or b"\0")
        return False
    message = gw.Message.parse(data)
    assert bytes(message) == data
    assert message.kind == expected.kind
    assert message.numel == expected.header.numel
    if message.kind == "dense":
        assert gw.decode(message).tobytes() == expected.values.tobytes()
        return True
    positions, negative = message.entries()
    np.testing.assert_array_equal(positions, expected.positions)
    np.testing.assert_array_equal(negative, expected.negative)
    again = gw.Message.from_entries(
        positions,
        negative,
        numel=message.numel,
        threshold=message.threshold,
        key=message.key,
        step=message.step,
        shakeup=message.is_shakeup,
    )
    assert bytes(again) == data
    return True


def sealed(what: Changes, payload: bytes | None = None, **fields: int) -> bytes:
    """Return the message of some changes with another payload and other header fields, sealed."""
    data = reference.encode_ternary(what.positions, what.negative, numel=what.numel, threshold=0.5)
    header = reference.Header.unpack(data)
    payload = data[reference.HEADER_BYTES :] if payload is None else payload
    everything = {"payload_bytes": len(payload), **fields}
    return reference.seal(replace(header, **everything), payload)


def payload_of(what: Changes) -> bytearray:
    """Return the payload of some changes."""
    return bytearray(sealed(what)[reference.HEADER_BYTES :])


@given(st.binary(max_size=200))
def test_random_bytes_parse_or_raise(data: bytes) -> None:
    same_verdict(data)
    same_verdict(b"GRDW\x01" + data)


@given(changes, thresholds)
def test_every_message_of_the_reference_is_valid(what: Changes, threshold: float) -> None:
    data = reference.encode_ternary(
        what.positions, what.negative, numel=what.numel, threshold=threshold
    )
    assert same_verdict(data)


@given(changes, header_changes, st.booleans())
def test_a_changed_header_is_judged_alike(
    what: Changes, fields: dict[str, int], reseal: bool
) -> None:
    same_verdict(sealed(what, **fields) if reseal else sealed(what)[:47])


@given(changes, sizes, sizes, sizes)
def test_changed_sizes_are_judged_alike(
    what: Changes, numel: int, count: int, payload_bytes: int
) -> None:
    header = reference.Header.unpack(sealed(what))
    fields = {
        "numel": max(0, header.numel + numel) % 2**64,
        "count": max(0, header.count + count) % 2**64,
        "payload_bytes": max(0, header.payload_bytes + payload_bytes) % 2**64,
    }
    fields["exponent"] = min(255, reference.chunk_exponent(fields["count"]))
    same_verdict(sealed(what, payload=None, **fields))


@given(changes, st.data())
def test_flipped_payload_bits_are_judged_alike(what: Changes, data: st.DataObject) -> None:
    payload = payload_of(what)
    bits = data.draw(st.lists(st.integers(0, max(0, 8 * len(payload) - 1)), max_size=3))
    for bit in bits if payload else []:
        payload[bit // 8] ^= 1 << bit % 8
    same_verdict(sealed(what, bytes(payload)))


@given(changes, st.data())
def test_a_changed_directory_is_judged_alike(what: Changes, data: st.DataObject) -> None:
    payload = payload_of(what)
    start = data.draw(st.integers(0, min(6, len(payload))))
    removed = data.draw(st.integers(0, 3))
    inserted = data.draw(st.binary(max_size=9))
    payload[start : start + removed] = inserted
    same_verdict(sealed(what, bytes(payload)))


@given(changes, st.binary(max_size=40), st.integers(0, 40))
def test_a_changed_end_is_judged_alike(what: Changes, added: bytes, cut: int) -> None:
    payload = payload_of(what)
    same_verdict(sealed(what, bytes(payload[: max(0, len(payload) - cut)]) + added))


@given(st.integers(0, 2_000), st.integers(0, 2_000), st.binary(max_size=400))
def test_a_random_payload_is_judged_alike(numel: int, count: int, payload: bytes) -> None:
    nothing = Changes(numel, np.zeros(0, np.int64), np.zeros(0, np.bool_))
    exponent = reference.chunk_exponent(count)
    same_verdict(sealed(nothing, payload, count=count, exponent=exponent))


@given(st.integers(1, 3), st.integers(0, 5), st.binary(max_size=48))
def test_dense_payloads_are_judged_alike(dtype: int, numel: int, payload: bytes) -> None:
    header = reference.Header(
        kind=reference.DENSE,
        flags=0,
        exponent=0,
        threshold_bits=0,
        dtype=dtype,
        key=1,
        step=2,
        numel=numel,
        count=numel,
        payload_bytes=len(payload),
    )
    same_verdict(reference.seal(header, payload))
    exact = (payload + bytes(48))[: numel * {1: 4, 2: 8, 3: 2}[dtype]]
    assert same_verdict(reference.seal(replace(header, payload_bytes=len(exact)), exact))


@given(st.lists(changes, max_size=4), st.binary(max_size=3))
def test_a_concatenation_is_split_without_a_copy(parts: list[Changes], rest: bytes) -> None:
    messages = [sealed(part) for part in parts]
    joined = bytearray(b"".join(messages))
    split = gw.parse_many(joined)
    assert [bytes(m) for m in split] == messages
    for message in split:
        assert memoryview(message).obj is not None
    if rest:
        with pytest.raises(MessageError):
            gw.parse_many(bytes(joined) + rest)
