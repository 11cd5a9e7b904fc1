"""The cluster secret: 32 random bytes, given raw, in hex, in base64, or in a file."""

from __future__ import annotations

import base64
import codecs
import hmac
import logging
import os
import secrets
import stat
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

SECRET_BYTES: Final = 32
SECRET_VARIABLE: Final = "GRADWIRE_SECRET"  # noqa: S105 - a name, not a secret
SECRET_FILE_VARIABLE: Final = "GRADWIRE_SECRET_FILE"  # noqa: S105
FILE_BYTES_MAX: Final = 4_096
FINGERPRINT_LABEL: Final = b"gradwire secret fingerprint 1"
REMEDY: Final = "`gradwire secret` makes one"


def generate_secret() -> str:
    """Return a new cluster secret: 32 random bytes in URL-safe base64."""
    return base64.urlsafe_b64encode(secrets.token_bytes(SECRET_BYTES)).decode("ascii")


def fingerprint(secret: bytes) -> str:
    """Return eight hex digits that identify the secret without revealing it."""
    return hmac.digest(secret, FINGERPRINT_LABEL, "sha256")[:4].hex()


def environment_secret() -> str | Path | None:
    """Return GRADWIRE_SECRET, the path GRADWIRE_SECRET_FILE, or None; raise `ValueError` if both are set."""
    text, file = map(os.environ.get, (SECRET_VARIABLE, SECRET_FILE_VARIABLE))
    if text and file:
        raise ValueError(f"both {SECRET_VARIABLE} and {SECRET_FILE_VARIABLE} are set: unset one")
    return Path(file) if file else text or None


def parse_secret(secret: bytes | str | os.PathLike[str] | None) -> bytes:
    """Return the 32 bytes of a cluster secret, given in any of the forms that `Node` takes.

    Raises:
        TypeError, ValueError: missing, unreadable, not 32 bytes, or not random: it could be guessed off-line.
    """
    name = "the cluster secret" + (f" in {SECRET_VARIABLE}" if secret is None else "")
    secret = environment_secret() if secret is None else secret
    if secret is None:
        raise ValueError(
            f"a cluster secret is needed: pass secret= or set {SECRET_VARIABLE} or {SECRET_FILE_VARIABLE}; {REMEDY}"
        )
    if isinstance(secret, os.PathLike):
        name = f"the cluster secret in {os.fspath(secret)}"
        secret = _read(Path(secret))
    elif not isinstance(secret, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"{name} must be 32 bytes, a text or a path, not {type(secret).__name__}")
    raw = _decode(secret, name) if isinstance(secret, str) else bytes(secret)
    if len(raw) != SECRET_BYTES:
        raise ValueError(f"{name} has {len(raw)} bytes; it must be 32 random bytes: {REMEDY}")
    # 32 random bytes have fewer than 16 distinct values with probability below 1e-13.
    if len(set(raw)) < 16:
        raise ValueError(f"{name} is not random enough to be safe: {REMEDY}")
    return raw


def _decode(text: str, name: str) -> bytes:
    text = text.strip()
    try:
        if len(text) == 2 * SECRET_BYTES:
            return bytes.fromhex(text)
        standard = text.replace("-", "+").replace("_", "/") + "=" * (-len(text) % 4)
        return base64.b64decode(standard, validate=True)
    except ValueError as error:  # or binascii.Error, which is one
        problem = f"{name} is neither 64 hex digits nor base64 of 32 bytes: {REMEDY}"
        raise ValueError(problem) from error


def _read(path: Path) -> bytes | str:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(FILE_BYTES_MAX)
    except OSError as error:
        raise ValueError(f"the secret file {path} cannot be read: {error.strerror}") from error
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        logger.warning("others can read or change the secret file: chmod 600 %s", path)
    text = data.removeprefix(codecs.BOM_UTF8)  # which some editors write
    return data if len(data) == SECRET_BYTES or not text.isascii() else text.decode("ascii")
