"""The Noise handshake against public vectors, mac1, replay protection, and the ratchet of sender keys."""

from __future__ import annotations

import hashlib
import hmac
import random

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from gradwire.transport import crypto

# The published vector of the cacophony project for Noise_NNpsk0_25519_AESGCM_SHA256.
PROLOGUE = bytes.fromhex("4a6f686e2047616c74")
PSK = bytes.fromhex("54686973206973206d7920417573747269616e20706572737065637469766521")
INITIATOR_KEY = bytes.fromhex("893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a")
RESPONDER_KEY = bytes.fromhex("bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b")
HANDSHAKE_HASH = "9f3b1f9afd7767767b5b9d1069844a6154fdbdcc36dfb3e31c0fffc5c973d530"
MESSAGES = [
    (
        "4c756477696720766f6e204d69736573",
        "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944"
        "7c37a89fc17813788d30df2d59501d6066f5f8aecc3406bbd9829f2d24a531b1",
    ),
    (
        "4d757272617920526f746862617264",
        "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843"
        "2f29d79368ef9de4e1ae7a362fb05bf0ad668e026bf5714554497b3a720461",
    ),
    ("462e20412e20486179656b", "7c01e898a6201f36aecee532e29cd0b7f8ffa29d3366ad0dce39a6"),
    ("4361726c204d656e676572", "a9ff535aace3db6a1da1a7fb00fe2de2622bb373abad9fb42c00e0"),
    (
        "4a65616e2d426170746973746520536179",
        "6cfc49a3e65472edc2d0152abe5ce950170a8a47c959f30bd48b5f0aacf29adbfd",
    ),
    (
        "457567656e2042f6686d20766f6e2042617765726b",
        "9bc86e6d974ed21ba04604a94aa68de21677eb409ead070c0cd569b069ee19ba142aa4c1a9",
    ),
]


def fixed(key: bytes) -> crypto.Entropy:
    return lambda _: key


def finished_handshake() -> tuple[crypto.Handshake, crypto.Handshake]:
    one, two = (crypto.Handshake(PSK, PROLOGUE) for _ in range(2))
    two.read_init(one.write_init(b""))
    one.read_response(two.write_response(b""))
    return one, two


def channels() -> tuple[crypto.ControlChannel, crypto.ControlChannel]:
    first, second = (bytes([value]) * 32 for value in (1, 2))
    return crypto.ControlChannel(first, second), crypto.ControlChannel(second, first)


def test_the_handshake_equals_the_published_noise_vector() -> None:
    one = crypto.Handshake(PSK, PROLOGUE, fixed(INITIATOR_KEY))
    two = crypto.Handshake(PSK, PROLOGUE, fixed(RESPONDER_KEY))
    payloads = [bytes.fromhex(payload) for payload, _ in MESSAGES]
    sealed = [bytes.fromhex(ciphertext) for _, ciphertext in MESSAGES]
    assert one.write_init(payloads[0]) == sealed[0]
    assert two.read_init(sealed[0]) == payloads[0]
    assert two.write_response(payloads[1]) == sealed[1]
    assert one.read_response(sealed[1]) == payloads[1]
    assert one.hash.hex() == two.hash.hex() == HANDSHAKE_HASH
    assert one.split() == two.split()


def test_the_control_channel_equals_the_published_noise_vector() -> None:
    one = crypto.Handshake(PSK, PROLOGUE, fixed(INITIATOR_KEY))
    two = crypto.Handshake(PSK, PROLOGUE, fixed(RESPONDER_KEY))
    two.read_init(one.write_init(bytes.fromhex(MESSAGES[0][0])))
    one.read_response(two.write_response(bytes.fromhex(MESSAGES[1][0])))
    first, second = one.split()
    senders = [crypto.ControlChannel(first, second), crypto.ControlChannel(second, first)]
    for index, (payload, ciphertext) in enumerate(MESSAGES[2:]):
        sender = senders[index % 2]
        assert sender.seal(sender.next_counter(), b"", bytes.fromhex(payload)).hex() == ciphertext


def test_a_first_message_made_with_another_secret_is_refused() -> None:
    outsider = crypto.Handshake(bytes(32), PROLOGUE)
    with pytest.raises(crypto.AuthenticationError):
        crypto.Handshake(PSK, PROLOGUE).read_init(outsider.write_init(b"hello"))


def test_another_prologue_is_another_protocol() -> None:
    with pytest.raises(crypto.AuthenticationError):
        crypto.Handshake(PSK, b"other").read_init(crypto.Handshake(PSK, PROLOGUE).write_init(b""))


def test_a_forged_response_leaves_the_handshake_unchanged() -> None:
    one, two = (crypto.Handshake(PSK, PROLOGUE) for _ in range(2))
    two.read_init(one.write_init(b""))
    true = two.write_response(b"true")
    forged = bytearray(true)
    forged[40] ^= 1
    for broken in (bytes(forged), b"", bytes(32) + true[32:], true[:47]):
        with pytest.raises(crypto.AuthenticationError):
            one.read_response(broken)
    assert one.read_response(true) == b"true"
    assert one.split() == two.split()


def test_two_handshakes_never_share_keys() -> None:
    assert finished_handshake()[0].split() != finished_handshake()[0].split()


def test_a_control_datagram_is_accepted_once() -> None:
    one, two = channels()
    counter = one.next_counter()
    sealed = one.seal(counter, b"header", b"text")
    body = memoryview(sealed)[6:]
    assert two.open(counter, b"header", body) == b"text"
    with pytest.raises(crypto.AuthenticationError):
        two.open(counter, b"header", body)


def test_a_changed_control_datagram_is_refused_and_the_true_one_still_accepted() -> None:
    one, two = channels()
    sealed = one.seal(one.next_counter(), b"header", b"text")
    broken = bytearray(sealed)
    broken[-1] ^= 1
    for header, body in ((b"Header", sealed[6:]), (b"header", bytes(broken[6:]))):
        with pytest.raises(crypto.AuthenticationError):
            two.open(0, header, memoryview(body))
    assert two.open(0, b"header", memoryview(sealed)[6:]) == b"text"


def test_control_datagrams_may_come_in_any_order_within_the_window() -> None:
    one, two = channels()
    sealed = [
        one.seal(one.next_counter(), b"", bytes([n & 255])) for n in range(crypto.REPLAY_WINDOW)
    ]
    order = list(range(len(sealed)))
    random.Random(7).shuffle(order)
    for counter in order:
        assert two.open(counter, b"", memoryview(sealed[counter])) == bytes([counter & 255])
    for counter in order:
        with pytest.raises(crypto.AuthenticationError):
            two.open(counter, b"", memoryview(sealed[counter]))


def test_a_control_datagram_older_than_the_window_is_refused() -> None:
    one, two = channels()
    old = one.seal(0, b"", b"old")
    edge = one.seal(1, b"", b"edge")
    newest = crypto.REPLAY_WINDOW
    two.open(newest, b"", memoryview(one.seal(newest, b"", b"")))
    with pytest.raises(crypto.AuthenticationError):
        two.open(0, b"", memoryview(old))
    assert two.open(1, b"", memoryview(edge)) == b"edge"


def test_a_jump_of_the_counter_by_2_to_the_63_costs_nothing() -> None:
    one, two = channels()
    for counter in (3, 2**63, 2**63 + 1):
        assert two.open(counter, b"", memoryview(one.seal(counter, b"", b"x"))) == b"x"
    with pytest.raises(crypto.AuthenticationError):
        two.open(3, b"", memoryview(one.seal(3, b"", b"x")))


def test_the_key_of_a_control_channel_changes_and_the_one_before_opens_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(crypto, "CONTROL_DATAGRAMS", 10)
    one, two = channels()
    sealed = []
    for number in range(35):
        counter = one.next_counter()
        sealed.append(one.seal(counter, b"", bytes([number])))
        assert two.open(counter, b"", memoryview(sealed[-1])) == bytes([number])
    # Keys change with the datagrams 9, 19 and 29. The other direction has its own, unchanged.
    for counter in range(29):
        fresh = channels_like(two)
        with pytest.raises(crypto.AuthenticationError):
            fresh.open(counter, b"", memoryview(sealed[counter]))
    assert channels_like(two).open(29, b"", memoryview(sealed[29])) == bytes([29])
    assert one.open(0, b"", memoryview(two.seal(two.next_counter(), b"", b"back"))) == b"back"


def channels_like(channel: crypto.ControlChannel) -> crypto.ControlChannel:
    """Return a channel that has the receiving key of another, as its memory shows it, and has seen nothing."""
    return crypto.ControlChannel(bytes(32), channel._receive.key)


def test_a_lost_or_forged_datagram_changes_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crypto, "CONTROL_DATAGRAMS", 2)
    one, two = channels()
    one.seal(one.next_counter(), b"", b"lost")
    one.seal(one.next_counter(), b"", b"lost")  # the first under the second key
    for counter in range(5):
        with pytest.raises(crypto.AuthenticationError):
            two.open(counter, b"", memoryview(bytes(40)))
    assert two.open(2, b"", memoryview(one.seal(one.next_counter(), b"", b"text"))) == b"text"


def test_mac1_is_the_keyed_hash_of_everything_before_it() -> None:
    secret = bytes(range(32))
    key = hmac.digest(secret, b"gradwire transport 3 mac1\x01", "sha256")
    expected = hashlib.blake2b(b"datagram", key=key, digest_size=16).digest()
    assert crypto.Mac1(secret).sign(b"datagram") == b"datagram" + expected


def test_only_holders_of_the_secret_make_a_valid_mac1_and_every_bit_counts() -> None:
    mac1 = crypto.Mac1(bytes(range(32)))
    signed = mac1.sign(b"datagram")
    assert mac1.verify(signed)
    assert not crypto.Mac1(bytes(32)).verify(signed)
    for bit in range(8 * len(signed)):
        changed = bytearray(signed)
        changed[bit // 8] ^= 1 << bit % 8
        assert not mac1.verify(bytes(changed))
    assert not mac1.verify(b"")
    assert not mac1.verify(signed[:-1])


# ---- sender keys ------------------------------------------------------------------------------------------------

EPOCH = 1 << crypto.EPOCH_BITS


def chain(first_record: int = 0, seed: int = 1) -> crypto.KeyChain:
    entropy = random.Random(seed).randbytes
    return crypto.KeyChain(entropy(16), entropy(12), first_record)


def seal(keys: crypto.KeyChain, record: int, text: bytes = b"text") -> bytes:
    sealed = bytearray(len(text) + 16)
    keys.seal_into(record, memoryview(text), b"head", memoryview(sealed))
    return bytes(sealed)


def opened(
    keys: crypto.KeyChain, record: int, sealed: bytes | bytearray, header: bytes = b"head"
) -> bytes:
    plain = bytearray(len(sealed) - 16)
    keys.open_into(record, memoryview(sealed), header, memoryview(plain))
    return bytes(plain)


def test_records_open_only_with_their_key_number_and_header() -> None:
    sealed = seal(chain(), 5)
    for keys, record, header in (
        (chain(seed=2), 5, b"head"),
        (chain(), 6, b"head"),
        (chain(), 5, b"Head"),
    ):
        with pytest.raises(crypto.AuthenticationError):
            opened(keys, record, sealed, header)
    assert opened(chain(), 5, sealed) == b"text"


@pytest.mark.parametrize("first_epoch", [0, 3, (1 << 26) - 4])
def test_both_sides_derive_the_keys_of_the_next_epochs(first_epoch: int) -> None:
    sender, receiver = chain(first_epoch * EPOCH), chain(first_epoch * EPOCH)
    keys = set()
    for epoch in range(first_epoch, first_epoch + 4):
        for record in (epoch * EPOCH, epoch * EPOCH + EPOCH - 1):
            assert opened(receiver, record, seal(sender, record)) == b"text"
        keys.add(sender.key_of(epoch * EPOCH))
        assert sender.key_of(epoch * EPOCH) == receiver.key_of(epoch * EPOCH)
    assert len(keys) == 4


def test_around_a_boundary_records_of_both_epochs_open_in_any_order() -> None:
    sender, receiver = chain(), chain()
    records = list(range(EPOCH - 20, EPOCH + 20))
    sealed = {record: seal(sender, record) for record in records}
    random.Random(1).shuffle(records)
    for record in records:
        assert opened(receiver, record, sealed[record]) == b"text"


def test_a_receiver_of_nothing_for_whole_epochs_opens_the_next_record() -> None:
    sender, receiver = chain(), chain()
    for epoch in range(4):
        sealed = seal(sender, epoch * EPOCH)
    assert opened(receiver, 3 * EPOCH, sealed) == b"text"
    beyond = (4 + crypto.EPOCHS_AHEAD_MAX) * EPOCH
    with pytest.raises(crypto.AuthenticationError, match="newest is 3"):
        opened(receiver, beyond, sealed)
    assert opened(receiver, 3 * EPOCH, sealed) == b"text"


def test_only_the_two_newest_epochs_are_kept() -> None:
    keys = chain()
    old = seal(keys, 7)
    for epoch in (1, 2):
        seal(keys, epoch * EPOCH)
        assert opened(keys, epoch * EPOCH - 1, seal(keys, epoch * EPOCH - 1)) == b"text"
    with pytest.raises(crypto.AuthenticationError):
        opened(keys, 7, old)


def test_a_node_that_gets_the_key_of_an_epoch_reads_the_next_ones_and_none_before() -> None:
    sender = chain()
    before, after = seal(sender, EPOCH - 1), seal(sender, EPOCH)
    joined = crypto.KeyChain(*sender.key_of(EPOCH), first_record=EPOCH)
    assert opened(joined, EPOCH, after) == b"text"
    assert opened(joined, 2 * EPOCH, seal(sender, 2 * EPOCH)) == b"text"
    with pytest.raises(crypto.AuthenticationError):
        opened(joined, EPOCH - 1, before)


def test_versions_of_cryptography_without_the_copy_free_calls_give_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = seal(chain(), 5)

    class OldAesGcm:
        def __init__(self, key: bytes) -> None:
            aead = AESGCM(key)
            self.encrypt, self.decrypt = aead.encrypt, aead.decrypt

    monkeypatch.setattr(crypto, "AESGCM", OldAesGcm)
    assert seal(chain(), 5) == expected
    assert opened(chain(), 5, expected) == b"text"
    changed = bytearray(expected)
    changed[0] ^= 1
    with pytest.raises(crypto.AuthenticationError):
        opened(chain(), 5, changed)
