"""Two processes on real devices of the kernel: a cable of a known rate that loses datagrams at random.

The rates that messages reach are figures of `benchmarks`; the tests here check deliveries, losses and retransmissions.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from . import netns
from .netns import Cable, Network
from .processes import PeerProcess

pytestmark = pytest.mark.netns

MESSAGE_BYTES = 1 << 20
# A process that does not run for longer than a probe timeout is probed with a datagram that was not lost.
PROBES_MAX = 20
IP_UDP_BYTES = 28


@pytest.fixture(autouse=True)
def _kernel() -> None:
    reason = netns.missing()
    if reason is not None:
        pytest.skip(reason)


@dataclass(frozen=True)
class Result:
    """The datagrams of a transfer.

    Attributes:
        sent: datagrams that left the sender.
        again: data datagrams sent more than once.
        cut: datagrams that the kernel lost at random.
        lost: all datagrams that left the sender and did not arrive, those that found a queue full included.
        overflows: how often a queue was full.
    """

    sent: int
    again: int
    cut: int
    lost: int
    overflows: int


@contextlib.contextmanager
def _peers(
    network: Network, limits: dict[str, int] | None = None
) -> Iterator[tuple[PeerProcess, PeerProcess]]:
    """Start one node on each host."""
    bind = {host: f"{network.addresses[host]}:0" for host in netns.HOSTS}
    with (
        PeerProcess(bind=bind["b"], limits=limits, within=network.within("b")) as target,
        PeerProcess(
            [target.address], bind=bind["a"], limits=limits, within=network.within("a")
        ) as source,
    ):
        yield source, target


def transfer(cable: Cable, messages: int) -> Result:
    """Send messages of 1 MB from host a to host b; each must come once, in order, with the right bytes."""
    with netns.network(cable) as network, _peers(network) as (source, target):
        source.ask("wait", peers=1)
        target.tell("receive", messages=messages)
        sent = source.ask("send", messages=messages, nbytes=MESSAGE_BYTES)
        received = target.answer()
        assert sent["is_drained"]
        assert received["tags"] == {str(source.id): list(range(messages))}
        came = received["stats"]["datagrams_received"]
        return Result(
            sent=sent["stats"]["datagrams_sent"],
            again=sent["stats"]["retransmitted_fragments"],
            cut=network.lost("b"),
            lost=sent["stats"]["datagrams_sent"] - came,
            overflows=network.overflows("b"),
        )


def check_losses(result: Result, loss: float) -> None:
    """Check that the kernel lost the configured share and that hardly more was sent again."""
    assert 0.5 * loss <= result.cut / result.sent <= 2 * loss
    assert result.lost >= result.cut
    assert result.lost <= result.cut + PROBES_MAX or result.overflows
    assert result.again <= 1.2 * result.lost + PROBES_MAX


@pytest.mark.parametrize("loss", [0.0, 0.001, 0.01, 0.05])
@pytest.mark.parametrize(("rate_mbit", "messages"), [(100, 24), (1_000, 64)])
def test_lost_datagrams_are_sent_again_and_hardly_any_others(
    rate_mbit: int, messages: int, loss: float
) -> None:
    check_losses(transfer(Cable(rate_mbit=rate_mbit, loss=loss), messages), loss)


def test_larger_datagrams_pass_a_cable_that_takes_them() -> None:
    limits = {"datagram_bytes": 9_000 - IP_UDP_BYTES}
    cable = Cable(rate_mbit=100, mtu=9_000)
    with netns.network(cable) as network, _peers(network, limits) as (source, target):
        source.ask("wait", peers=1)
        target.tell("receive", messages=8)
        sent = source.ask("send", messages=8, nbytes=MESSAGE_BYTES)
        assert sent["is_drained"]
        assert target.answer()["tags"] == {str(source.id): list(range(8))}
        assert sent["stats"]["datagrams_sent"] < 8 * MESSAGE_BYTES / 4_000


def test_datagrams_larger_than_the_path_are_fragmented_by_the_hosts() -> None:
    limits = {"datagram_bytes": 9_000 - IP_UDP_BYTES}
    cable = Cable(rate_mbit=100, mtu=1_500)
    with netns.network(cable) as network, _peers(network, limits) as (source, target):
        source.ask("wait", peers=1)
        target.tell("receive", messages=8)
        assert source.ask("send", messages=8, nbytes=MESSAGE_BYTES)["is_drained"]
        assert target.answer()["tags"] == {str(source.id): list(range(8))}


def test_a_network_leaves_nothing_behind_when_a_test_fails() -> None:
    def own_namespaces() -> list[str]:
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, check=True, text=True)
        return [line for line in listed.stdout.splitlines() if f"gradwire-{os.getpid()}-" in line]

    assert own_namespaces() == []
    seen = []
    with pytest.raises(ZeroDivisionError), netns.network(Cable(rate_mbit=10)):
        seen.append(len(own_namespaces()) == 3 and 1 / 0)
    assert seen == []
    assert own_namespaces() == []
    with pytest.raises(netns.Refused, match="tc qdisc add"), netns.network(Cable(rate_mbit=0)):
        pass
    assert own_namespaces() == []
