"""Make the golden messages with the reference codec; existing files are kept and never overwritten.

Run ``python tests/golden/make.py`` in an environment with gradwire. A file that exists with other
bytes is an error: the format has a version number for that. ``valid/NAME.bin`` comes with
``valid/NAME.json``, what it stands for; ``invalid/NAME.bin`` breaks exactly the rule stated in
``invalid/NAME.json``, with a correct CRC.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradwire import reference

HERE = Path(__file__).parent
Entries = tuple[NDArray[np.int64], NDArray[np.bool_]]


# --- valid messages -------------------------------------------------------------------------------


def scattered(numel: int, density: float, seed: int) -> Entries:
    """Return entries at random places, each element with the given probability."""
    rng = np.random.default_rng(seed)
    positions = np.flatnonzero(rng.random(numel) < density).astype(np.int64)
    return positions, rng.random(positions.size) < 0.5


def signed_entries(entries: Entries) -> list[int]:
    """Return one number per entry: one-based position, negative for minus."""
    positions, negative = entries
    return [int(x) for x in np.where(negative, -(positions + 1), positions + 1)]


def ternary(
    numel: int, entries: Entries, threshold: float = 0.5, **header: Any
) -> tuple[bytes, Any]:
    """Return a ternary message and its description."""
    data = reference.encode_ternary(*entries, numel=numel, threshold=threshold, **header)
    message = reference.parse(data)
    chunks = [
        {"changed": c.changed, "unchanged": c.unchanged, "inverted": c.inverted, "k": c.k}
        for c in message.chunks
    ]
    about = {
        "kind": message.kind,
        "numel": numel,
        "threshold": threshold,
        "key": header.get("key", 0),
        "step": header.get("step", 0),
        "shakeup": bool(header.get("flags", 0)),
        "chunks": chunks,
        "entries_one_based": signed_entries(entries),
    }
    return data, about


def dense(values: NDArray[Any], name: str, **header: Any) -> tuple[bytes, Any]:
    """Return a dense message and its description; uint16 values are bfloat16 bits."""
    data = reference.encode_dense(values, **header)
    about = {
        "kind": "dense",
        "numel": values.size,
        "dtype": name,
        "key": header.get("key", 0),
        "step": header.get("step", 0),
        "values": [float(v) for v in reference.parse(data).values],
    }
    return data, about


def at(*one_based: int) -> Entries:
    """Return entries from signed one-based positions."""
    numbers = np.array(one_based, dtype=np.int64)
    return np.abs(numbers) - 1, numbers < 0


def everything(numel: int, seed: int) -> Entries:
    """Return entries for every element, with random signs."""
    return np.arange(numel, dtype=np.int64), np.random.default_rng(seed).random(numel) < 0.5


def regions(parts: list[tuple[int, float]], seed: int) -> tuple[int, Entries]:
    """Return numel and entries of regions of given lengths and densities, one after the other."""
    rng = np.random.default_rng(seed)
    changed = np.concatenate([rng.random(length) < density for length, density in parts])
    positions = np.flatnonzero(changed).astype(np.int64)
    return changed.size, (positions, rng.random(positions.size) < 0.5)


def valid_messages() -> dict[str, tuple[bytes, Any]]:
    """Return every valid golden message by name."""
    mixed = regions([(40_000, 0.01), (900, 0.5), (900, 0.97), (500, 1.0), (9_000, 0.05)], seed=11)
    trailing_dense = regions([(3_000, 0.02), (700, 0.95)], seed=12)
    bfloat16_bits = np.array([0x3F80, 0xBF80, 0x0001, 0x8000, 0x7F7F], dtype=np.uint16)
    return {
        "numel-0": ternary(0, at()),
        "count-0": ternary(1_000_003, at()),
        "one-element-changed": ternary(1, at(-1)),
        "one-element-unchanged": ternary(1, at()),
        "first-and-last-of-many": ternary(100_000, at(1, -100_000)),
        "worked-example": ternary(20, at(3, -8, 20), key=7, step=1000),
        "far-apart": ternary(2**48, at(1, -(2**47), 2**48)),
        "one-sparse-chunk": ternary(10_000, scattered(10_000, 0.01, 1)),
        "one-chunk-exactly-full": ternary(5_000, scattered_exactly(5_000, 256, 2)),
        "one-chunk-full-plus-one": ternary(5_000, scattered_exactly(5_000, 257, 3)),
        "bitmap": ternary(400, scattered(400, 0.5, 4)),
        "inverted": ternary(250, scattered(250, 0.9, 5)),
        "inverted-last-unchanged": ternary(20, at(*range(1, 20))),
        "all-changed": ternary(300, everything(300, 6)),
        "all-negative": ternary(64, (np.arange(64, dtype=np.int64), np.ones(64, np.bool_))),
        "many-chunks-mixed": ternary(mixed[0], mixed[1]),
        "many-chunks-last-inverted": ternary(trailing_dense[0], trailing_dense[1]),
        "many-chunks-all-changed": ternary(700, everything(700, 7)),
        "many-bitmap-chunks": ternary(1_500, scattered(1_500, 0.45, 8)),
        "larger-chunks": ternary(60_000, scattered(60_000, 0.15, 9)),
        "shakeup": ternary(500, scattered(500, 0.1, 10), flags=1),
        "maximal-key-and-step": ternary(9, at(1, -2, 9), key=2**32 - 1, step=2**32 - 1),
        "smallest-threshold": ternary(9, at(5), threshold=2.0**-133),
        "largest-threshold": ternary(9, at(-5), threshold=255.0 * 2.0**120),
        "polarity-boundary-inverted": ternary(20, at(*range(1, 14))),
        "polarity-boundary-listed": ternary(20, at(*range(1, 13))),
        "dense-numel-0": dense(np.zeros(0, np.float32), "float32"),
        "dense-float32": dense(np.array([1.5, -0.0, 3e-45, -3e38], np.float32), "float32", step=5),
        "dense-float64": dense(np.array([0.1, -5e-324, 1e308]), "float64", key=3),
        "dense-bfloat16": dense(bfloat16_bits, "bfloat16"),
    }


def scattered_exactly(numel: int, count: int, seed: int) -> Entries:
    """Return exactly ``count`` entries at random places."""
    rng = np.random.default_rng(seed)
    positions = np.sort(rng.choice(numel, count, replace=False)).astype(np.int64)
    return positions, rng.random(count) < 0.5


# --- invalid messages -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """A message taken apart, so that one part can be broken and the rest sealed again."""

    header: reference.Header
    directory: bytes
    bits: NDArray[np.uint8]

    @staticmethod
    def of(data: bytes, directory_bytes: int = 0) -> Parts:
        """Take a valid message apart."""
        header = reference.Header.unpack(data)
        payload = data[reference.HEADER_BYTES :]
        stream = np.frombuffer(payload[directory_bytes:], np.uint8)
        return Parts(header, payload[:directory_bytes], np.unpackbits(stream, bitorder="little"))

    def seal(self, **header: Any) -> bytes:
        """Put the parts together; ``header`` overrides fields."""
        payload = self.directory + np.packbits(self.bits, bitorder="little").tobytes()
        fields = {"payload_bytes": len(payload), **header}
        return reference.seal(replace(self.header, **fields), payload)

    def flipped(self, *bits: int) -> Parts:
        """Flip bits of the stream."""
        changed = self.bits.copy()
        changed[list(bits)] ^= 1
        return replace(self, bits=changed)

    def swapped(self, first: int, second: int) -> Parts:
        """Swap two bits of the stream, so that the number of ones stays."""
        changed = self.bits.copy()
        assert changed[first] != changed[second]
        changed[[first, second]] = changed[[second, first]]
        return replace(self, bits=changed)


def header_rules() -> dict[str, tuple[bytes, str, str]]:
    """Return messages that break a rule of the header: bytes, rule and words of the error."""
    good = Parts.of(reference.encode_ternary(*at(3, -8, 20), numel=20, threshold=0.5))
    raw = Parts.of(reference.encode_dense(np.array([1.0, 2.0], np.float32)))
    sealed, dense_sealed = good.seal(), raw.seal()
    crc_flipped = bytearray(sealed)
    crc_flipped[20] ^= 1
    nan_bits = 0x7FC0
    return {
        "empty": (b"", "a message has at least 48 bytes", "at least 48 bytes"),
        "header-cut": (sealed[:47], "a message has at least 48 bytes", "at least 48 bytes"),
        "magic": (good.seal(magic=b"GRDV"), "magic is GRDW", "magic"),
        "version-0": (good.seal(version=0), "version is 1", "version"),
        "version-2": (good.seal(version=2), "version is 1", "version"),
        "kind-0": (good.seal(kind=0), "kind is 1 or 2", "kind"),
        "kind-3": (good.seal(kind=3), "kind is 1 or 2", "kind"),
        "flag-multiplicity": (good.seal(flags=2), "only flag bit 0 may be set", "flags"),
        "flag-unknown": (good.seal(flags=0x80), "only flag bit 0 may be set", "flags"),
        "flag-shakeup-dense": (raw.seal(flags=1), "a dense message has no flags", "flags"),
        "reserved": (good.seal(reserved=1), "the reserved byte is 0", "reserved"),
        "exponent-small": (good.seal(exponent=7), "exp follows from count", "exp is 7"),
        "exponent-large": (good.seal(exponent=9), "exp follows from count", "exp is 9"),
        "exponent-dense": (raw.seal(exponent=8), "exp is 0 if dense", "exp must be 0"),
        "threshold-zero": (good.seal(threshold_bits=0), "threshold is positive", "threshold"),
        "threshold-minus": (good.seal(threshold_bits=0xBF00), "threshold is positive", "threshold"),
        "threshold-inf": (good.seal(threshold_bits=0x7F80), "threshold is finite", "threshold"),
        "threshold-nan": (good.seal(threshold_bits=nan_bits), "threshold is finite", "threshold"),
        "threshold-dense": (
            raw.seal(threshold_bits=0x3F00),
            "threshold is 0 if dense",
            "threshold",
        ),
        "dtype-ternary": (good.seal(dtype=1), "dtype is 0 if ternary", "dtype"),
        "dtype-dense-0": (raw.seal(dtype=0), "dtype is 1, 2 or 3 if dense", "dtype"),
        "dtype-dense-4": (raw.seal(dtype=4), "dtype is 1, 2 or 3 if dense", "dtype"),
        "crc": (bytes(crc_flipped), "the CRC-32C matches", "CRC-32C"),
        "numel": (good.seal(numel=2**48 + 1), "numel is at most 2^48", "numel"),
        "count-above-numel": (good.seal(numel=2), "count is at most numel", "more than numel"),
        "count-dense": (raw.seal(count=1), "count is numel if dense", "count is 1"),
        "payload-cut": (sealed[:-1], "all payload bytes are there", "payload bytes"),
        "payload-cut-dense": (dense_sealed[:-1], "all payload bytes are there", "payload bytes"),
        "payload-size-dense": (
            replace(raw, bits=raw.bits[:-8]).seal(),
            "a dense payload has numel values",
            "payload bytes for",
        ),
        "trailing-byte": (sealed + b"\0", "nothing follows the message", "follow a message"),
        "count-beyond-payload": (
            good.seal(numel=2**40, count=2**32, exponent=18),
            "the payload holds a sign for each changed element",
            "cannot hold",
        ),
    }


def directory_rules() -> dict[str, tuple[bytes, str, str]]:
    """Return messages that break a rule of the directory."""
    # Every tenth element changed: a full chunk with U = 2304, k = 3, Q = 256, and a rest of 44.
    tenth = np.arange(9, 3_000, 10, dtype=np.int64)
    entries = (tenth, np.zeros(tenth.size, np.bool_))
    message = reference.encode_ternary(*entries, numel=3_000, threshold=0.5)
    parts = Parts.of(message, directory_bytes=4)
    assert parts.directory == b"\x80\x12\x80\x02", parts.directory.hex()
    nothing = Parts.of(reference.encode_ternary(*at(), numel=9, threshold=0.5))
    return {
        "payload-without-count": (
            replace(nothing, directory=b"\0").seal(),
            "no changed element, no payload",
            "nothing changed",
        ),
        "varint-superfluous-zero": (
            replace(parts, directory=b"\x80\x92\x00\x80\x02").seal(),
            "directory varints are minimal",
            "superfluous",
        ),
        "varint-too-long": (
            replace(parts, directory=b"\x80" * 7 + b"\x01").seal(),
            "varints have at most 7 bytes",
            "more than 7 bytes",
        ),
        "chunk-beyond-numel": (
            parts.seal(numel=2_603),
            "the chunks leave room for the elements that follow",
            "too few",
        ),
        "quotients-too-far": (
            replace(parts, directory=b"\x80\x12\xa1\x02").seal(),
            "quotients do not reach beyond the chunk",
            "quotients sum to 289",
        ),
        "quotients-beyond-payload": (
            replace(parts, bits=parts.bits[: 256 * 4 + 512]).seal(),
            "the bits of every chunk are in the payload",
            "needs bits",
        ),
    }


def stream_rules() -> dict[str, tuple[bytes, str, str]]:
    """Return messages that break a rule of the bits."""
    tenth = np.arange(9, 3_000, 10, dtype=np.int64)
    entries = (tenth, np.zeros(tenth.size, np.bool_))
    parts = Parts.of(reference.encode_ternary(*entries, numel=3_000, threshold=0.5), 4)
    first = 256 * 3 + 256  # the bit where the first chunk's quotients begin
    last = parts.bits.size - 1 - int(np.argmax(parts.bits[::-1]))
    plain = Parts.of(reference.encode_ternary(*at(3, -8, 20), numel=20, threshold=0.5))
    whole = Parts.of(reference.encode_ternary(*everything(12, 1), numel=12, threshold=0.5))
    # A full chunk of 284 elements with 28 unchanged ones, the last of them at 278: k = 3.
    flags = np.ones(300, dtype=np.bool_)
    flags[8:285:10] = False
    inverted_entries = np.flatnonzero(flags).astype(np.int64)
    inverted = Parts.of(
        reference.encode_ternary(
            inverted_entries, np.zeros(inverted_entries.size, bool), numel=300, threshold=0.5
        ),
        2,
    )
    assert inverted.directory == b"\x1c\x1c", inverted.directory.hex()
    assert not inverted.bits[:3].any()  # the first remainder: adding 5 moves the last one to 283
    ends = "every quotient ends with a one, and the last with the chunk's bits"
    return {
        "quotient-missing": (parts.flipped(first + 1).seal(), ends, "quotients end"),
        "quotient-extra": (parts.flipped(first).seal(), ends, "quotients end"),
        "quotients-end-with-zero": (
            parts.swapped(first + 510, first + 511).seal(),
            ends,
            "quotients end",
        ),
        "last-quotient-missing": (parts.flipped(last).seal(), ends, "quotients end"),
        "last-quotient-extra": (plain.flipped(plain.bits.size - 1).seal(), ends, "quotients end"),
        "chunk-ends-early": (
            parts.flipped(0).seal(),
            "a listed chunk ends with its last changed element",
            "listed elements end",
        ),
        "chunk-ends-late": (
            parts.flipped(1).seal(),
            "a listed chunk ends with its last changed element",
            "listed elements end",
        ),
        "inverted-chunk-ends-unchanged": (
            inverted.flipped(0, 2).seal(),
            "an inverted chunk but the last ends with a changed element",
            "listed elements end",
        ),
        "last-element-beyond-numel": (
            plain.seal(numel=19),
            "the last chunk ends at numel",
            "listed elements end",
        ),
        "padding-byte": (
            replace(parts, bits=np.append(parts.bits, np.zeros(8, np.uint8))).seal(),
            "fewer than 8 padding bits",
            "fewer than 8",
        ),
        "padding-byte-all-changed": (
            replace(whole, bits=np.append(whole.bits, np.zeros(8, np.uint8))).seal(),
            "fewer than 8 padding bits",
            "fewer than 8",
        ),
        "padding-one-all-changed": (
            whole.flipped(whole.bits.size - 1).seal(),
            "padding bits are zero",
            "all zero",
        ),
    }


def invalid_messages() -> dict[str, tuple[bytes, str, str]]:
    """Return every invalid golden message by name."""
    return {**header_rules(), **directory_rules(), **stream_rules()}


# --- files ----------------------------------------------------------------------------------------


def add(path: Path, data: bytes) -> None:
    """Write a new file; an existing one must hold the same bytes."""
    if path.exists():
        if path.read_bytes() != data:
            raise SystemExit(f"{path} exists with other bytes: golden files are add-only")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    sys.stdout.write(f"added {path.relative_to(HERE)}\n")


def text(content: Any) -> bytes:
    """Return a JSON text, one field a line."""
    fields = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items()]
    return ("{\n" + ",\n".join(fields) + "\n}\n").encode()


def main() -> None:
    """Add whatever is missing."""
    for name, (data, about) in valid_messages().items():
        add(HERE / "valid" / f"{name}.bin", data)
        add(HERE / "valid" / f"{name}.json", text(about))
    for name, (data, rule, words) in invalid_messages().items():
        add(HERE / "invalid" / f"{name}.bin", data)
        add(HERE / "invalid" / f"{name}.json", text({"rule": rule, "reference_error": words}))


if __name__ == "__main__":
    main()
