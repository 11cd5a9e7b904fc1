"""docs/message-format.md says what the code does: its numbers, its example and its rules."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import gradwire as gw
from gradwire import reference

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"
TEXT = (ROOT / "docs" / "message-format.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """Return the text under a heading."""
    return TEXT.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def example_bytes() -> bytes:
    """Return the bytes of the worked example, put together by their offsets."""
    block = section("Worked example").split("```")[1]
    found = re.findall(r"(?<!\S)(\d\d)  ((?:[0-9a-f]{2} )*[0-9a-f]{2})(?=  |$)", block, re.M)
    pieces = sorted((int(offset), bytes.fromhex(text)) for offset, text in found)
    data = b""
    for offset, piece in pieces:
        assert offset == len(data)
        data += piece
    return data


def test_the_worked_example_is_the_golden_message() -> None:
    data = example_bytes()
    assert data == (GOLDEN / "valid" / "worked-example.bin").read_bytes()
    message = gw.Message.parse(data)
    assert gw.decode(message).tolist() == [0.0] * 2 + [0.5] + [0.0] * 4 + [-0.5] + [0.0] * 11 + [
        0.5
    ]
    assert (message.key, message.step) == (7, 1000)


def test_the_worked_example_s_bits_are_those_of_its_table() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\d+)` \| (\d+) \| `(\d+)` \| `(\d)` \|", TEXT, re.M)
    assert [int(row[0]) for row in rows] == [2, 7, 19]
    for element, distance, remainder, quotient, unary, _ in rows:
        assert int(remainder[::-1], 2) + 4 * int(quotient) == int(distance), element
        assert unary == "0" * int(quotient) + "1"
    bits = "".join(row[2] for row in rows) + "".join(row[5] for row in rows)
    bits += "".join(row[4] for row in rows) + "0"
    assert f"`{bits[:8]} {bits[8:]}`" in TEXT
    packed = np.packbits(np.array([int(b) for b in bits], np.uint8), bitorder="little")
    assert packed.tobytes() == example_bytes()[48:]


def test_every_rule_has_its_invalid_file_and_every_file_its_rule() -> None:
    listed = re.findall(r"`([a-z0-9-]+)`", section("Validation rules").split("| --- |", 1)[1])
    files = {path.stem for path in (GOLDEN / "invalid").glob("*.bin")}
    assert sorted(listed) == sorted(files)


@pytest.mark.parametrize(
    ("field", "offset"),
    [
        *[("magic", 0), ("ver", 4), ("threshold", 8), ("dtype", 10), ("key u32", 12)],
        *[("step u32", 16), ("crc u32", 20), ("numel u64", 24), ("count u64", 32)],
        ("payload_bytes u64", 40),
    ],
)
def test_the_ruler_gives_the_offset_of_every_field(field: str, offset: int) -> None:
    lines = section("Header: 48 bytes").split("```")[1].splitlines()
    place = next(i for i, line in enumerate(lines) if field in line)
    names = lines[place]
    column = max(names.rindex("|", 0, names.index(field)), 0)
    ruler = lines[place - 2]
    numbers = {m.start(): int(m.group()) for m in re.finditer(r"\d+", ruler)}
    nearest = min(numbers, key=lambda start: abs(start - column))
    assert numbers[nearest] == offset


def test_the_formulas_are_the_reference_s() -> None:
    assert "max(8, bit_length(max(count, 1) - 1) // 2 + 2)" in TEXT
    assert "bit_length(32 * (2 * S - n) // (133 * n))" in TEXT
    assert "20 * U <= 7 * S" in TEXT
    for count in (0, 1, 255, 4_096, 4_097, 10**6, 2**40):
        assert reference.chunk_exponent(count) == max(8, (max(count, 1) - 1).bit_length() // 2 + 2)
    for changed, unchanged in ((1, 0), (13, 7), (12, 8), (256, 137), (256, 138), (5, 10**9)):
        chunk = reference.Chunk(0, changed, unchanged)
        span = changed + unchanged
        assert chunk.inverted == (20 * unchanged <= 7 * span)
        n = unchanged if chunk.inverted else changed
        assert chunk.k == ((32 * (2 * span - n) // (133 * n)).bit_length() if n else 0)
