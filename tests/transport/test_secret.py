"""The cluster secret: every form of it, from every place, and what is refused with the remedy."""

from __future__ import annotations

import base64
import codecs
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from gradwire.transport import Node, secret

RAW = bytes(range(100, 132))


def test_a_secret_is_taken_as_bytes_hex_or_base64(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = [RAW, RAW.hex(), RAW.hex().upper(), base64.b64encode(RAW).decode()]
    forms.append(base64.urlsafe_b64encode(RAW).decode().rstrip("="))
    assert {secret.parse_secret(form) for form in forms} == {RAW}
    monkeypatch.setenv(secret.SECRET_VARIABLE, RAW.hex())
    assert secret.parse_secret(None) == RAW


@pytest.mark.parametrize(
    ("weak", "reason"),
    [
        (b"short", "5 bytes"),
        (bytes(32), "not random"),
        ("correct horse battery staple", "neither"),
        ("password", "bytes"),
        (b"ab" * 16, "not random"),
        ("zz" * 32, "neither"),
        ("", "0 bytes"),
    ],
)
def test_a_weak_or_malformed_secret_is_refused_with_the_remedy(
    weak: bytes | str, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        secret.parse_secret(weak)
    assert "gradwire secret" in str(caught.value)


def test_a_missing_secret_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(secret.SECRET_VARIABLE, raising=False)
    with pytest.raises(ValueError, match="gradwire secret"):
        secret.parse_secret(None)


def test_generated_secrets_are_accepted_and_differ() -> None:
    made = {secret.generate_secret() for _ in range(50)}
    assert len({secret.parse_secret(each) for each in made}) == 50


@pytest.fixture
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (secret.SECRET_VARIABLE, secret.SECRET_FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def written(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("strange", [10**30, 32, -1, True, 1.5, [300] * 32, {}], ids=repr)
def test_a_secret_of_another_type_is_refused_by_its_name(strange: Any) -> None:
    kind = type(strange).__name__
    with pytest.raises(TypeError, match=f"the cluster secret must be 32 bytes, .*, not {kind}"):
        secret.parse_secret(strange)


@pytest.mark.parametrize(
    "data",
    [
        RAW,
        RAW.hex().encode() + b"\n",
        base64.b64encode(RAW),
        base64.urlsafe_b64encode(RAW) + b"\r\n",
        codecs.BOM_UTF8 + base64.b64encode(RAW),
    ],
    ids=["bytes", "hex", "base64", "URL-safe base64", "with a byte order mark"],
)
def test_a_file_may_hold_any_form(tmp_path: Path, data: bytes) -> None:
    assert secret.parse_secret(written(tmp_path / "secret", data)) == RAW


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "0 bytes"),
        (bytes(32), "not random"),
        (b"a password", "neither"),
        (b"\xff" * 33, "33 bytes"),
    ],
)
def test_a_weak_secret_in_a_file_is_refused_by_the_file_s_name(
    tmp_path: Path, data: bytes, reason: str
) -> None:
    path = written(tmp_path / "weak-secret", data)
    with pytest.raises(ValueError, match=reason) as caught:
        secret.parse_secret(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere cannot be read: No such file"):
        secret.parse_secret(tmp_path / "nowhere")


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX's")
@pytest.mark.parametrize(
    ("mode", "warnings"), [(0o600, 0), (0o640, 1), (0o644, 1), (0o604, 1), (0o620, 1), (0o602, 1)]
)
def test_a_file_that_others_can_read_or_write_is_warned_about_with_the_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warnings: int
) -> None:
    path = written(tmp_path / "secret", RAW, mode)
    with caplog.at_level(logging.WARNING):
        assert secret.parse_secret(path) == RAW
    assert [f"chmod 600 {path}" in record.message for record in caplog.records] == [True] * warnings


@pytest.mark.usefixtures("no_environment")
def test_the_environment_may_name_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "secret", RAW.hex().encode())
    monkeypatch.setenv(secret.SECRET_FILE_VARIABLE, str(path))
    assert secret.parse_secret(None) == RAW
    monkeypatch.setenv(secret.SECRET_VARIABLE, RAW.hex())
    with pytest.raises(ValueError, match="both GRADWIRE_SECRET and GRADWIRE_SECRET_FILE"):
        secret.parse_secret(None)


def test_nodes_with_the_same_secret_from_a_file_and_from_bytes_connect(tmp_path: Path) -> None:
    path = written(tmp_path / "secret", RAW)
    with (
        Node("127.0.0.1:0", secret=path) as one,
        Node("127.0.0.1:0", [one.address], secret=RAW) as two,
    ):
        assert one.wait_for_peers(1, timeout_s=10.0) == (two.peer,)
