"""Keys and ciphers: the Noise handshake, mac1, control channels and sender keys.

Source: The Noise Protocol Framework, revision 34, sections 5, 7.4 and 9 (pattern NNpsk0); RFC 6479 for the replay
window.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from .wire import MAC1_BYTES, TAG_BYTES

PROTOCOL_NAME: Final = b"Noise_NNpsk0_25519_AESGCM_SHA256"
PROLOGUE: Final = b"gradwire transport 2"
PUBLIC_KEY_BYTES: Final = 32
REPLAY_WINDOW: Final = 1_024
# Records of 62 kB sealed under one AES-GCM key: 2^34 blocks, for which an attacker's advantage stays below 2^-60
# (RFC 8446, section 5.5, with the bounds it cites).
EPOCH_BITS: Final = 22
KEY_BYTES: Final = 16
IV_BYTES: Final = 12
NEXT_KEY_LABEL: Final = b"gradwire transport next sender key"

Entropy = Callable[[int], bytes]


class AuthenticationError(Exception):
    """A tag did not verify, or a counter was repeated; the datagram is dropped."""


def _hkdf(chaining_key: bytes, material: bytes, outputs: int) -> list[bytes]:
    temporary = hmac.digest(chaining_key, material, "sha256")
    result = [hmac.digest(temporary, b"\x01", "sha256")]
    for index in range(2, outputs + 1):
        result.append(hmac.digest(temporary, result[-1] + bytes([index]), "sha256"))
    return result


class Mac1:
    """The code that ends handshake datagrams, which only holders of the cluster secret can compute.

    One hash rejects another cluster's datagram before any decryption and any Diffie-Hellman. The code proves knowledge
    of the secret and nothing else: a recorded datagram keeps its code.

    Source: mac1 of WireGuard (Donenfeld 2017, section 5.4.4), with the secret in place of a public key.

    Args:
        secret: the 32-byte cluster secret.
    """

    def __init__(self, secret: bytes) -> None:
        # One step of HKDF-Expand: the secret itself is a key for the handshake only.
        key = hmac.digest(secret, b"gradwire transport 2 mac1\x01", "sha256")
        self._keyed = hashlib.blake2b(key=key, digest_size=MAC1_BYTES)

    def sign(self, datagram: bytes) -> bytes:
        """Return the datagram with its code appended."""
        return datagram + self._digest(datagram)

    def verify(self, datagram: bytes) -> bool:
        """Return whether the datagram ends with its code."""
        return hmac.compare_digest(
            datagram[-MAC1_BYTES:], self._digest(memoryview(datagram)[:-MAC1_BYTES])
        )

    def _digest(self, data: bytes | memoryview) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(data)
        return keyed.digest()


class Handshake:
    """One run of Noise_NNpsk0_25519_AESGCM_SHA256, as initiator or responder.

    The first message is sealed under the cluster secret, so a message made with another secret is dropped before any
    state or any Diffie-Hellman. The second adds the ephemeral exchange, so recorded traffic stays secret when the
    cluster secret leaks later.

    Args:
        secret: the 32-byte cluster secret.
        prologue: `PROLOGUE` and the header of the INIT; both sides bind the handshake to it.
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
        """The handshake hash, the same on both sides after the second message."""
        return self._hash

    def write_init(self, payload: bytes) -> bytes:
        """Return the initiator's message: ephemeral key and sealed payload."""
        return self._write_ephemeral() + self._encrypt_and_hash(payload)

    def read_init(self, message: bytes) -> bytes:
        """Return the payload of the initiator's message; raise `AuthenticationError` if it is a forgery."""
        return self._decrypt_and_hash(self._read_ephemeral(message))

    def write_response(self, payload: bytes) -> bytes:
        """Return the responder's message."""
        public = self._write_ephemeral()
        self._mix_key(self._shared())
        return public + self._encrypt_and_hash(payload)

    def read_response(self, message: bytes) -> bytes:
        """Return the payload of the responder's message.

        A forgery raises `AuthenticationError` and leaves the handshake unchanged, so the true response can still come.
        """
        saved = (self._chaining_key, self._hash, self._key, self._nonce, self._remote)
        try:
            rest = self._read_ephemeral(message)
            self._mix_key(self._shared())
            return self._decrypt_and_hash(rest)
        except AuthenticationError:
            self._chaining_key, self._hash, self._key, self._nonce, self._remote = saved
            raise

    def split(self) -> tuple[bytes, bytes]:
        """Return the keys (initiator to responder, responder to initiator), 32 bytes each."""
        first, second = _hkdf(self._chaining_key, b"", 2)
        return first, second

    def _write_ephemeral(self) -> bytes:
        # Made only now, so that refusing an INIT costs no curve arithmetic.
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

    Datagrams may be lost and reordered, so the counter travels in the header; each counter is accepted once.
    """

    def __init__(self, send_key: bytes, receive_key: bytes) -> None:
        self._send = AESGCM(send_key)
        self._receive = AESGCM(receive_key)
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
        """Return header, ciphertext and tag: a complete datagram."""
        return header + self._send.encrypt(noise_nonce(counter), plaintext, header)

    def open(self, counter: int, header: bytes, ciphertext: memoryview) -> bytes:
        """Return the plaintext; raise `AuthenticationError` if forged, changed, repeated, or older than the window."""
        if counter <= self._highest - REPLAY_WINDOW or self._is_seen(counter):
            raise AuthenticationError("a control datagram was repeated")
        try:
            plaintext = self._receive.decrypt(noise_nonce(counter), ciphertext, header)
        except InvalidTag as error:
            raise AuthenticationError("the tag does not verify") from error
        self._mark_seen(counter)
        return plaintext

    def _is_seen(self, counter: int) -> bool:
        return counter <= self._highest and self._seen >> (self._highest - counter) & 1 == 1

    def _mark_seen(self, counter: int) -> None:
        if counter > self._highest:
            # A jump past the window empties it; the shift is capped so that a huge jump costs nothing.
            shift = min(counter - self._highest, REPLAY_WINDOW)
            self._seen = (self._seen << shift | 1) & ((1 << REPLAY_WINDOW) - 1)
            self._highest = counter
        else:
            self._seen |= 1 << (self._highest - counter)


class KeyChain:
    """The keys under which one node seals its records for all its peers.

    Every 2^22 records a new epoch begins. Its key follows from the last one by a one-way function, so nobody has to
    announce it, and a node that joins later cannot read earlier epochs. The nonce is the IV xor the record number:
    record numbers never repeat within a process, and the first key and IV are fresh in every process.

    Args:
        key: 16 bytes, of epoch ``epoch``.
        iv: 12 bytes.
        first_record: a record of the epoch that the key is for.
    """

    def __init__(self, key: bytes, iv: bytes, first_record: int) -> None:
        self._newest = first_record >> EPOCH_BITS
        self._epochs = {self._newest: _EpochKey(key, iv)}

    @classmethod
    def generate(cls, first_record: int, entropy: Entropy) -> KeyChain:
        """Return a chain that begins with a fresh key, in the epoch of ``first_record``."""
        return cls(entropy(KEY_BYTES), entropy(IV_BYTES), first_record)

    def key_of(self, record: int) -> tuple[bytes, bytes]:
        """Return (key, iv) of a record's epoch."""
        epoch_key = self._epoch_key(record)
        return epoch_key.key, epoch_key.iv

    def seal_into(
        self, record: int, plaintext: memoryview, associated: bytes, out: memoryview
    ) -> None:
        """Seal one record; ``out`` has 16 bytes more than ``plaintext``."""
        epoch_key = self._epoch_key(record)
        nonce = (epoch_key.iv_number ^ record).to_bytes(IV_BYTES, "big")
        epoch_key.encrypt_into(nonce, plaintext, associated, out)

    def open_into(
        self, record: int, ciphertext: memoryview, associated: bytes, out: memoryview
    ) -> None:
        """Open one record, or raise `AuthenticationError`; ``out`` has 16 bytes less than ``ciphertext``."""
        epoch_key = self._epoch_key(record)
        nonce = (epoch_key.iv_number ^ record).to_bytes(IV_BYTES, "big")
        try:
            epoch_key.decrypt_into(nonce, ciphertext, associated, out)
        except InvalidTag as error:
            raise AuthenticationError("the tag does not verify") from error

    def _epoch_key(self, record: int) -> _EpochKey:
        epoch = record >> EPOCH_BITS
        found = self._epochs.get(epoch)
        if found is None:
            if epoch != self._newest + 1:
                raise AuthenticationError(f"no key for epoch {epoch}, the newest is {self._newest}")
            found = self._epochs[epoch] = self._epochs[self._newest].next()
            self._epochs.pop(epoch - 2, None)
            self._newest = epoch
        return found


class _EpochKey:
    """AES-GCM under the key of one epoch; uses the copy-free calls of ``cryptography`` >= 47 where they exist."""

    def __init__(self, key: bytes, iv: bytes) -> None:
        self.key = key
        self.iv = iv
        self.iv_number = int.from_bytes(iv, "big")
        self._aead = AESGCM(key)
        self.encrypt_into = getattr(self._aead, "encrypt_into", self._encrypt_and_copy)
        self.decrypt_into = getattr(self._aead, "decrypt_into", self._decrypt_and_copy)

    def next(self) -> _EpochKey:
        """Return the key of the next epoch."""
        material = hmac.digest(self.key, NEXT_KEY_LABEL + self.iv, "sha256")
        return _EpochKey(material[:KEY_BYTES], material[KEY_BYTES : KEY_BYTES + IV_BYTES])

    def _encrypt_and_copy(
        self, nonce: bytes, plaintext: memoryview, associated: bytes, out: memoryview
    ) -> None:
        out[:] = self._aead.encrypt(nonce, plaintext, associated)

    def _decrypt_and_copy(
        self, nonce: bytes, ciphertext: memoryview, associated: bytes, out: memoryview
    ) -> None:
        out[:] = self._aead.decrypt(nonce, ciphertext, associated)
