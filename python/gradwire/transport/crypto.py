"""Keys and ciphers: the Noise handshake, mac1, control channels and sender keys.

Source: The Noise Protocol Framework, revision 34, sections 5, 7.4 and 9 (pattern NNpsk0); RFC 6479 for the replay
window.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from typing import Final, TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from .wire import MAC1_BYTES, TAG_BYTES

PROTOCOL_NAME: Final = b"Noise_NNpsk0_25519_AESGCM_SHA256"
PROLOGUE: Final = b"gradwire transport 3"
PUBLIC_KEY_BYTES: Final = 32
REPLAY_WINDOW: Final = 1_024
# Records of 62 kB under one AES-GCM key: 2^34 blocks, an attacker's advantage below 2^-60 (RFC 8446, section 5.5).
EPOCH_BITS: Final = 22
CONTROL_DATAGRAMS: Final = 1 << 16  # under one key; with a heartbeat every 0.2 s at most 3.6 hours
EPOCHS_AHEAD_MAX: Final = 1_000  # 4 billion records; takes 10 ms
KEY_BYTES: Final = 16
IV_BYTES: Final = 12
FIRST_NONCE: Final = bytes(IV_BYTES)  # every key of a handshake seals one payload
NEXT_KEY_LABEL: Final = b"gradwire transport next sender key"

Entropy: TypeAlias = Callable[[int], bytes]
Transform = Callable[[bytes, memoryview, bytes, memoryview], object]
# A tag does not verify, a counter is repeated, or a handshake message is malformed; the datagram is dropped.
AuthenticationError: TypeAlias = InvalidTag


class RepeatedError(InvalidTag):
    """A control datagram of the peer that was accepted before, or is older than the window; with its plaintext."""


def _hkdf(chaining_key: bytes, material: bytes, outputs: int) -> list[bytes]:
    temporary = hmac.digest(chaining_key, material, "sha256")
    result = [hmac.digest(temporary, b"\x01", "sha256")]
    for index in range(2, outputs + 1):
        result.append(hmac.digest(temporary, result[-1] + bytes([index]), "sha256"))
    return result


class Mac1:
    """The code at the end of handshake datagrams: WireGuard's mac1, with the secret in place of a public key."""

    def __init__(self, secret: bytes) -> None:
        # One step of HKDF-Expand: the secret itself is a key for the handshake only.
        key = hmac.digest(secret, b"gradwire transport 3 mac1\x01", "sha256")
        self._keyed = hashlib.blake2b(key=key, digest_size=MAC1_BYTES)

    def sign(self, datagram: bytes) -> bytes:
        """Return the datagram with its code appended."""
        keyed = self._keyed.copy()
        keyed.update(datagram)
        return datagram + keyed.digest()

    def verify(self, datagram: bytes) -> bool:
        """Return whether the datagram ends with its code."""
        return hmac.compare_digest(datagram, self.sign(datagram[:-MAC1_BYTES]))


class Handshake:
    """One run of Noise_NNpsk0_25519_AESGCM_SHA256, as initiator or responder.

    The first message is sealed under the cluster secret alone; the second adds the ephemeral exchange.
    """

    def __init__(self, secret: bytes, prologue: bytes, entropy: Entropy = os.urandom) -> None:
        self._entropy = entropy
        self._ephemeral: X25519PrivateKey | None = None
        self._remote = b""  # the other side's public key
        self.hash = PROTOCOL_NAME  # the same on both sides after the second message
        self._mix_hash(prologue)
        self._chaining_key, mixed, self._key = _hkdf(PROTOCOL_NAME, secret, 3)
        self._mix_hash(mixed)

    def write_init(self, payload: bytes) -> bytes:
        """Return the initiator's message: ephemeral key and sealed payload."""
        return self._write_ephemeral() + self._encrypt(payload)

    def read_init(self, message: bytes) -> bytes:
        """Return the payload of the initiator's message; raise `AuthenticationError` if it is a forgery."""
        return self._decrypt(self._read_ephemeral(message))

    def write_response(self, payload: bytes) -> bytes:
        """Return the responder's message."""
        public = self._write_ephemeral()
        self._mix_shared()
        return public + self._encrypt(payload)

    def read_response(self, message: bytes) -> bytes:
        """Return the responder's payload; `AuthenticationError` leaves it as it was for the true one."""
        saved = (self._chaining_key, self._key, self.hash)
        try:
            sealed = self._read_ephemeral(message)
            self._mix_shared()
            return self._decrypt(sealed)
        except AuthenticationError:
            self._chaining_key, self._key, self.hash = saved
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
        self._remote, sealed = message[:PUBLIC_KEY_BYTES], message[PUBLIC_KEY_BYTES:]
        if len(sealed) < TAG_BYTES:
            raise AuthenticationError("a handshake message is too short")
        self._mix_hash(self._remote)
        self._mix_key(self._remote)
        return sealed

    def _mix_shared(self) -> None:
        if self._ephemeral is None:
            raise AuthenticationError("a response before the first message")
        try:
            self._mix_key(self._ephemeral.exchange(X25519PublicKey.from_public_bytes(self._remote)))
        except ValueError as error:  # a low-order point gives an all-zero result
            raise AuthenticationError("an unusable public key") from error

    def _mix_hash(self, data: bytes) -> None:
        self.hash = hashlib.sha256(self.hash + data).digest()

    def _mix_key(self, material: bytes) -> None:
        self._chaining_key, self._key = _hkdf(self._chaining_key, material, 2)

    def _encrypt(self, plaintext: bytes) -> bytes:
        ciphertext = AESGCM(self._key).encrypt(FIRST_NONCE, plaintext, self.hash)
        self._mix_hash(ciphertext)
        return ciphertext

    def _decrypt(self, ciphertext: bytes) -> bytes:
        plaintext = AESGCM(self._key).decrypt(FIRST_NONCE, ciphertext, self.hash)
        self._mix_hash(ciphertext)
        return plaintext


class ControlChannel:
    """One session's two control keys, its own counter, and the window of counters seen; each is accepted once."""

    def __init__(self, send_key: bytes, receive_key: bytes) -> None:
        self.highest_received = -1  # the highest counter accepted so far
        self._send = _EpochKey(send_key, FIRST_NONCE)
        self._receive = _EpochKey(receive_key, FIRST_NONCE)
        self._counter = 0
        self._seen = 0  # bit i: the counter ``highest_received - i`` was accepted

    def next_counter(self) -> int:
        """Return the counter for the next datagram; no counter is returned twice."""
        self._counter += 1
        if self._counter % CONTROL_DATAGRAMS == 0:
            # The peer notices. Whoever finds a key in memory opens nothing that was sealed with the ones before.
            self._send = self._send.following()
        return self._counter - 1

    def seal(self, counter: int, header: bytes, plaintext: bytes) -> bytes:
        """Return header, ciphertext and tag: a complete datagram."""
        return header + self._send.aead.encrypt(self._send.nonce(counter), plaintext, header)

    def open(self, counter: int, header: bytes, ciphertext: memoryview) -> bytes:
        """Return the plaintext; raise `AuthenticationError` if forged, `RepeatedError` if repeated or too old."""
        # The window counts only after the tag has verified: a forged counter must not shut out genuine datagrams.
        try:
            plaintext = self._receive.aead.decrypt(self._receive.nonce(counter), ciphertext, header)
        except AuthenticationError:
            following = self._receive.following()
            plaintext = following.aead.decrypt(following.nonce(counter), ciphertext, header)
            self._receive = following  # what is late under the key before counts as lost
        age = self.highest_received - counter
        if age >= REPLAY_WINDOW or (age >= 0 and self._seen >> age & 1):
            raise RepeatedError(plaintext)
        if age < 0:
            # A jump past the window empties it; the shift is capped so that a huge jump costs nothing.
            self._seen = (self._seen << min(-age, REPLAY_WINDOW)) & ((1 << REPLAY_WINDOW) - 1)
            self.highest_received = counter
        self._seen |= 1 << max(age, 0)
        return plaintext


class KeyChain:
    """The keys under which one node seals its records for all its peers.

    Every 2^22 records a new epoch begins, whose key follows from the key before by a one-way function. The nonce is the
    IV xor the record number, which never repeats within a process; every process begins with a fresh key and IV.
    """

    def __init__(self, key: bytes, iv: bytes, first_record: int) -> None:
        self._newest = first_record >> EPOCH_BITS
        self._epochs = {self._newest: _EpochKey(key, iv)}

    def key_of(self, record: int) -> tuple[bytes, bytes]:
        """Return (key, iv) of a record's epoch."""
        epoch_key = self._epoch_key(record)
        return epoch_key.key, epoch_key.iv

    def seal_into(self, record: int, plain: memoryview, header: bytes, out: memoryview) -> None:
        """Seal one record; ``out`` has 16 bytes more than ``plain``."""
        epoch_key = self._epoch_key(record)
        epoch_key.encrypt_into(epoch_key.nonce(record), plain, header, out)

    def open_into(self, record: int, sealed: memoryview, header: bytes, out: memoryview) -> None:
        """Open one record, or raise `AuthenticationError`; ``out`` has 16 bytes less than ``sealed``."""
        epoch_key = self._epoch_key(record)
        epoch_key.decrypt_into(epoch_key.nonce(record), sealed, header, out)

    def tags(self, record: int, first: int, datagrams: list[memoryview]) -> list[bytes]:
        """Return the tags of neighbouring fragments of a record; a tag covers the datagram but for its kind."""
        # A record is sealed once, and its number does not have the highest bit: no nonce meets other bytes.
        key = self._epoch_key(record)
        number = key.iv_number ^ (1 << 95 | record << 8)
        return [
            key.aead.encrypt((number ^ index).to_bytes(IV_BYTES, "big"), b"", datagram[2:])
            for index, datagram in enumerate(datagrams, first)
        ]

    def _epoch_key(self, record: int) -> _EpochKey:
        epoch = record >> EPOCH_BITS
        # A peer that got SKIPs for all records of an epoch continues in a later one.
        ahead = epoch - self._newest
        for _ in range(ahead if ahead <= EPOCHS_AHEAD_MAX else 0):
            last = self._epochs[self._newest]
            # The last epoch stays, because records that were sent before this one may still arrive.
            self._epochs = {self._newest: last, self._newest + 1: last.following()}
            self._newest += 1
        epoch_key = self._epochs.get(epoch)
        if epoch_key is None:
            raise AuthenticationError(f"no key for epoch {epoch}, the newest is {self._newest}")
        return epoch_key


class _EpochKey:
    """An AES-GCM key and IV, from which only the following ones can be computed; a control key has no IV."""

    def __init__(self, key: bytes, iv: bytes) -> None:
        self.key, self.iv = key, iv
        self.iv_number = int.from_bytes(iv, "big")
        self.aead = aead = AESGCM(key)
        self.encrypt_into: Transform = getattr(aead, "encrypt_into", _copying(aead.encrypt))
        self.decrypt_into: Transform = getattr(aead, "decrypt_into", _copying(aead.decrypt))

    def nonce(self, number: int) -> bytes:
        """Return the nonce of a record or control datagram."""
        return (self.iv_number ^ number).to_bytes(IV_BYTES, "big")

    def following(self) -> _EpochKey:
        """Return the key after this one."""
        material = hmac.digest(self.key, NEXT_KEY_LABEL + self.iv, "sha256")
        return _EpochKey(material[: len(self.key)], material[len(self.key) :][:IV_BYTES])


def _copying(transform: Callable[[bytes, memoryview, bytes], bytes]) -> Transform:
    """Return ``encrypt_into`` or ``decrypt_into`` for ``cryptography`` before 47, which lacks them."""

    def into(nonce: bytes, data: memoryview, associated: bytes, out: memoryview) -> None:
        out[:] = transform(nonce, data, associated)

    return into
