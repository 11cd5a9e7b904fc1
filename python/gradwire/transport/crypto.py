"""Keys and ciphers: the Noise handshake, control channels and sender keys.

Source: The Noise Protocol Framework, revision 34, sections 5, 7.4 and 9 (pattern NNpsk0); RFC 6479 for the replay
window.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from typing import Final, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from .wire import MARK_BYTES, TAG_BYTES

__all__ = [
    "AuthenticationError",
    "ControlChannel",
    "Handshake",
    "Marker",
    "SenderKey",
]

PROTOCOL_NAME: Final = b"Noise_NNpsk0_25519_AESGCM_SHA256"
PUBLIC_KEY_BYTES: Final = 32
REPLAY_WINDOW: Final = 1_024

Entropy = Callable[[int], bytes]


class AuthenticationError(Exception):
    """A tag did not verify, or a counter was seen before; the datagram is dropped."""


class Aead(Protocol):
    """What records (into given memory) and control datagrams (small, so a copy costs nothing) need."""

    def seal(self, nonce: bytes, plaintext: bytes, associated: bytes) -> bytes:
        """Return ciphertext and tag."""

    def open(self, nonce: bytes, ciphertext: memoryview, associated: bytes) -> bytes:
        """Return the plaintext.

        Raises:
            AuthenticationError: the tag does not verify.
        """

    def seal_into(
        self, nonce: bytes, plaintext: memoryview, associated: bytes, out: memoryview
    ) -> None:
        """Write ciphertext and tag (``len(plaintext) + 16`` bytes) into ``out``."""

    def open_into(
        self, nonce: bytes, ciphertext: memoryview, associated: bytes, out: memoryview
    ) -> None:
        """Write the plaintext (``len(ciphertext) - 16`` bytes) into ``out``.

        Raises:
            AuthenticationError: the tag does not verify.
        """


class AesGcm:
    """AES-GCM; uses the copy-free calls of ``cryptography`` >= 47 where they exist."""

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self.seal = self._aead.encrypt
        self._encrypt_into = getattr(self._aead, "encrypt_into", None)
        self._decrypt_into = getattr(self._aead, "decrypt_into", None)
        self.seal_into = self._encrypt_into or self._seal_and_copy

    @property
    def seals_in_place(self) -> bool:
        """Whether this ``cryptography`` has the copy-free calls."""
        return self._encrypt_into is not None

    def open(self, nonce: bytes, ciphertext: memoryview, associated: bytes) -> bytes:
        """See `Aead.open`."""
        try:
            return self._aead.decrypt(nonce, ciphertext, associated)
        except InvalidTag as error:
            raise AuthenticationError("the tag does not verify") from error

    def _seal_and_copy(
        self, nonce: bytes, plaintext: memoryview, associated: bytes, out: memoryview
    ) -> None:
        out[:] = self._aead.encrypt(nonce, plaintext, associated)

    def open_into(
        self, nonce: bytes, ciphertext: memoryview, associated: bytes, out: memoryview
    ) -> None:
        """See `Aead.open_into`."""
        if self._decrypt_into is None:
            out[:] = self.open(nonce, ciphertext, associated)
            return
        try:
            self._decrypt_into(nonce, ciphertext, associated, out)
        except InvalidTag as error:
            raise AuthenticationError("the tag does not verify") from error


class Plain:
    """No encryption and no authentication: only behind ``insecure=True``, to measure what they cost."""

    TAG: Final = bytes(TAG_BYTES)

    def seal(
        self,
        nonce: bytes,  # noqa: ARG002 - the interface of Aead
        plaintext: bytes,
        associated: bytes,  # noqa: ARG002
    ) -> bytes:
        """Return the plaintext and a tag of zeros."""
        return plaintext + self.TAG

    def open(
        self,
        nonce: bytes,  # noqa: ARG002
        ciphertext: memoryview,
        associated: bytes,  # noqa: ARG002
    ) -> bytes:
        """Return the plaintext; any tag but zeros is refused."""
        if ciphertext[-TAG_BYTES:] != self.TAG:
            raise AuthenticationError("the tag does not verify")
        return bytes(ciphertext[:-TAG_BYTES])

    def seal_into(
        self,
        nonce: bytes,  # noqa: ARG002
        plaintext: memoryview,
        associated: bytes,  # noqa: ARG002
        out: memoryview,
    ) -> None:
        """Copy the plaintext and append a tag of zeros."""
        out[: len(plaintext)] = plaintext
        out[len(plaintext) :] = self.TAG

    def open_into(
        self,
        nonce: bytes,  # noqa: ARG002
        ciphertext: memoryview,
        associated: bytes,  # noqa: ARG002
        out: memoryview,
    ) -> None:
        """Copy the plaintext; any tag but zeros is refused."""
        if ciphertext[-TAG_BYTES:] != self.TAG:
            raise AuthenticationError("the tag does not verify")
        out[:] = ciphertext[:-TAG_BYTES]


def make_aead(key: bytes, *, insecure: bool) -> Aead:
    """Return the cipher for ``key``."""
    return Plain() if insecure else AesGcm(key)


def _hkdf(chaining_key: bytes, material: bytes, outputs: int) -> list[bytes]:
    temporary = hmac.digest(chaining_key, material, "sha256")
    result = [hmac.digest(temporary, b"\x01", "sha256")]
    for index in range(2, outputs + 1):
        result.append(hmac.digest(temporary, result[-1] + bytes([index]), "sha256"))
    return result


class Marker:
    """Ends handshake datagrams with a mark that only who knows the secret can make.

    One hash tells a stranger's datagram, before any decryption and any Diffie-Hellman. The mark proves knowledge of the
    secret and nothing else: a recorded datagram keeps its mark.

    Source: mac1 of WireGuard (Donenfeld 2017, section 5.4.4), with the secret in place of a public key.

    Args:
        secret: the 32-byte cluster secret.
        insecure: whether the node neither encrypts nor authenticates; such nodes have marks of their own.
    """

    def __init__(self, secret: bytes, *, insecure: bool = False) -> None:
        # One step of HKDF-Expand: the secret itself is a key for the handshake only.
        label = b"gradwire transport 1 mark" + (b" insecure" if insecure else b"")
        key = hmac.digest(secret, label + b"\x01", "sha256")
        self._keyed = hashlib.blake2b(key=key, digest_size=MARK_BYTES)

    def mark(self, datagram: bytes) -> bytes:
        """Return the datagram with its mark."""
        return datagram + self._mark_of(datagram)

    def is_marked(self, datagram: bytes) -> bool:
        """Whether the datagram ends with its mark."""
        return hmac.compare_digest(
            datagram[-MARK_BYTES:], self._mark_of(memoryview(datagram)[:-MARK_BYTES])
        )

    def _mark_of(self, data: bytes | memoryview) -> bytes:
        hash_ = self._keyed.copy()
        hash_.update(data)
        return hash_.digest()


class Handshake:
    """One run of Noise_NNpsk0_25519_AESGCM_SHA256, as initiator or responder.

    The first message is sealed under the cluster secret, so a stranger's is dropped before any state or any
    Diffie-Hellman; the second adds the ephemeral exchange, so recorded traffic stays secret when the secret leaks
    later.

    Args:
        secret: the 32-byte cluster secret.
        prologue: bytes that both sides must agree on.
        entropy: source of random bytes.
    """

    def __init__(self, secret: bytes, prologue: bytes, entropy: Entropy = os.urandom) -> None:
        self._chaining_key = PROTOCOL_NAME
        self._hash = PROTOCOL_NAME
        self._key = b""
        self._nonce = 0
        self._entropy = entropy
        self._ephemeral: X25519PrivateKey | None = None
        self._remote = b""
        self._mix_hash(prologue)
        self._mix_key_and_hash(secret)

    @property
    def hash(self) -> bytes:
        """The handshake hash: both sides have the same after the second message."""
        return self._hash

    def write_init(self, payload: bytes) -> bytes:
        """Return the initiator's message: ephemeral key and sealed payload."""
        return self._write_ephemeral() + self._encrypt_and_hash(payload)

    def read_init(self, message: bytes) -> bytes:
        """Return the payload of the initiator's message.

        Raises:
            AuthenticationError: the sender does not know the secret, or the message was changed.
        """
        return self._decrypt_and_hash(self._read_ephemeral(message))

    def write_response(self, payload: bytes) -> bytes:
        """Return the responder's message."""
        public = self._write_ephemeral()
        self._mix_key(self._shared())
        return public + self._encrypt_and_hash(payload)

    def read_response(self, message: bytes) -> bytes:
        """Return the payload of the responder's message.

        Raises:
            AuthenticationError: not an answer to our message by someone who knows the secret.
        """
        rest = self._read_ephemeral(message)
        self._mix_key(self._shared())
        return self._decrypt_and_hash(rest)

    def attempt_response(self, message: bytes) -> bytes:
        """Like `read_response`, but a forgery leaves the handshake as it was, so the true answer can still come."""
        saved = (self._chaining_key, self._hash, self._key, self._nonce, self._remote)
        try:
            return self.read_response(message)
        except AuthenticationError:
            self._chaining_key, self._hash, self._key, self._nonce, self._remote = saved
            raise

    def split(self) -> tuple[bytes, bytes]:
        """Return the keys (initiator to responder, responder to initiator), 32 bytes each."""
        first, second = _hkdf(self._chaining_key, b"", 2)
        return first, second

    def _write_ephemeral(self) -> bytes:
        # Made only now, so that refusing a stranger's first message costs no curve arithmetic.
        self._ephemeral = X25519PrivateKey.from_private_bytes(self._entropy(PUBLIC_KEY_BYTES))
        public = self._ephemeral.public_key().public_bytes_raw()
        self._mix_hash(public)
        self._mix_key(public)
        return public

    def _read_ephemeral(self, message: bytes) -> bytes:
        if len(message) < PUBLIC_KEY_BYTES + TAG_BYTES:
            raise AuthenticationError("a handshake message is too short")
        self._remote = message[:PUBLIC_KEY_BYTES]
        self._mix_hash(self._remote)
        self._mix_key(self._remote)
        return message[PUBLIC_KEY_BYTES:]

    def _shared(self) -> bytes:
        if self._ephemeral is None:
            raise AuthenticationError("a response before the first message")
        try:
            return self._ephemeral.exchange(X25519PublicKey.from_public_bytes(self._remote))
        except ValueError as error:  # a low-order point gives an all-zero result
            raise AuthenticationError("an unusable public key") from error

    def _mix_hash(self, data: bytes) -> None:
        self._hash = hashlib.sha256(self._hash + data).digest()

    def _mix_key(self, material: bytes) -> None:
        self._chaining_key, self._key = _hkdf(self._chaining_key, material, 2)
        self._nonce = 0

    def _mix_key_and_hash(self, material: bytes) -> None:
        self._chaining_key, mixed, self._key = _hkdf(self._chaining_key, material, 3)
        self._mix_hash(mixed)
        self._nonce = 0

    def _encrypt_and_hash(self, plaintext: bytes) -> bytes:
        ciphertext = AESGCM(self._key).encrypt(noise_nonce(self._nonce), plaintext, self._hash)
        self._nonce += 1
        self._mix_hash(ciphertext)
        return ciphertext

    def _decrypt_and_hash(self, ciphertext: bytes) -> bytes:
        try:
            plaintext = AESGCM(self._key).decrypt(noise_nonce(self._nonce), ciphertext, self._hash)
        except InvalidTag as error:
            raise AuthenticationError("a handshake message does not verify") from error
        self._nonce += 1
        self._mix_hash(ciphertext)
        return plaintext


def noise_nonce(counter: int) -> bytes:
    """Return the AES-GCM nonce that Noise defines: four zero bytes and the counter, big-endian."""
    return bytes(4) + counter.to_bytes(8, "big")


class ControlChannel:
    """One session's two control keys, its own counter, and the window of counters already seen.

    Datagrams may be lost and reordered, so the counter travels in the header; each is accepted once.
    """

    def __init__(self, send_key: bytes, receive_key: bytes, *, insecure: bool = False) -> None:
        self._send = make_aead(send_key, insecure=insecure)
        self._receive = make_aead(receive_key, insecure=insecure)
        self._counter = 0
        self._highest = -1
        self._seen = 0

    @property
    def highest_received(self) -> int:
        """The highest counter accepted so far, -1 before the first."""
        return self._highest

    def next_counter(self) -> int:
        """Return the counter for the next datagram; never the same one twice."""
        self._counter += 1
        return self._counter - 1

    def seal(self, counter: int, header: bytes, plaintext: bytes) -> bytes:
        """Return header, ciphertext and tag: a whole datagram."""
        return header + self._send.seal(noise_nonce(counter), plaintext, header)

    def open(self, counter: int, header: bytes, ciphertext: memoryview) -> bytes:
        """Return the plaintext of a datagram that was not seen before.

        Raises:
            AuthenticationError: forged, changed, repeated, or older than the window.
        """
        if counter <= self._highest - REPLAY_WINDOW or self._is_seen(counter):
            raise AuthenticationError("a control datagram came again")
        plaintext = self._receive.open(noise_nonce(counter), ciphertext, header)
        self._mark_seen(counter)
        return plaintext

    def _is_seen(self, counter: int) -> bool:
        return counter <= self._highest and self._seen >> (self._highest - counter) & 1 == 1

    def _mark_seen(self, counter: int) -> None:
        if counter > self._highest:
            # A jump past the whole window empties it; the shift is capped so that a huge jump costs nothing.
            shift = min(counter - self._highest, REPLAY_WINDOW)
            self._seen = (self._seen << shift | 1) & ((1 << REPLAY_WINDOW) - 1)
            self._highest = counter
        else:
            self._seen |= 1 << (self._highest - counter)


class SenderKey:
    """The key under which one node seals its records for all its peers during one epoch.

    The nonce is the IV xor the record number: record numbers never repeat within a process, and key and IV are fresh in
    every process and epoch.
    """

    KEY_BYTES: Final = 16
    IV_BYTES: Final = 12

    def __init__(self, epoch: int, key: bytes, iv: bytes, *, insecure: bool = False) -> None:
        self.epoch = epoch
        self.key = key
        self.iv = iv
        self._iv_number = int.from_bytes(iv, "big")
        self._aead = make_aead(key, insecure=insecure)

    @classmethod
    def generate(cls, epoch: int, entropy: Entropy, *, insecure: bool = False) -> SenderKey:
        """Return a fresh key."""
        return cls(epoch, entropy(cls.KEY_BYTES), entropy(cls.IV_BYTES), insecure=insecure)

    def seal_into(
        self, record: int, plaintext: memoryview, associated: bytes, out: memoryview
    ) -> None:
        """Seal one record; ``out`` has 16 bytes more than ``plaintext``."""
        self._aead.seal_into(
            (self._iv_number ^ record).to_bytes(12, "big"), plaintext, associated, out
        )

    def open_into(
        self, record: int, ciphertext: memoryview, associated: bytes, out: memoryview
    ) -> None:
        """Open one record.

        Raises:
            AuthenticationError: the tag does not verify.
        """
        self._aead.open_into(
            (self._iv_number ^ record).to_bytes(12, "big"), ciphertext, associated, out
        )
