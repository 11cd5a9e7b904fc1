"""The cost model: its bytes are those of real messages and datagrams, its times behave as steps do."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradwire as gw
from gradwire import calibration, cost
from gradwire.cost import Job, Rates, dense_ring, exchange
from gradwire.policy import owners_density
from gradwire.transport import Limits
from gradwire.transport.crypto import KeyChain
from gradwire.transport.records import Sealer

from .transport.simulator import Link, Simulator

FREE = Rates(**dict.fromkeys(Rates.__dataclass_fields__, 0.0))


def job(**changes: Any) -> Job:
    values = {"elements": 5_000_000, "nodes": 4, "step_s": 0.1, "link_bytes_per_s": 12.5e6}
    return Job(**{**values, **changes})


@pytest.mark.parametrize("density", [0.0, 1e-3, 1e-2, 0.1, 0.3, 0.5, 0.8, 0.99, 1.0])
@pytest.mark.parametrize("numel", [1 << 16, 1 << 20])
def test_a_message_has_the_predicted_size(numel: int, density: float) -> None:
    rng = np.random.default_rng([7, numel])
    update = np.where(rng.random(numel) < density, rng.choice([-1.0, 1.0], numel), 0.0)
    message = gw.Encoder(numel, threshold=1.0).encode(update.astype(np.float32))
    assert cost.message_bytes(numel, message.density) == pytest.approx(
        message.nbytes, rel=0.03, abs=16
    )


def test_dense_messages_have_exactly_the_predicted_size() -> None:
    for codec, dense in (("dense", True), ("bfloat16", "bfloat16")):
        message = gw.Encoder(1000).encode(np.ones(1000, np.float32), dense=dense)  # type: ignore[arg-type]
        assert cost.message_bytes(1000, 1.0, codec) == message.nbytes  # type: ignore[arg-type]


@pytest.mark.parametrize("nbytes", [0, 1, 1_144, 1_145, 62_000, 1 << 20])
def test_a_transfer_takes_as_many_bytes_as_the_transport_puts_on_the_wire(nbytes: int) -> None:
    sealer = Sealer(KeyChain(bytes(16), bytes(12), 0), 1, Limits().datagram_bytes)
    given = job(frame_bytes=0)
    # Only the last fragment of each record may be short: one datagram per record between the two.
    slack = sealer.records_of(nbytes) * 16
    assert cost.transfer_bytes(nbytes, given) == pytest.approx(sealer.wire_bytes(nbytes), abs=slack)


@pytest.mark.parametrize(
    ("nodes", "density"),
    [
        (8, 0.01),
        (8, 0.05),
        *(pytest.param(nodes, 0.01, marks=pytest.mark.slow) for nodes in (32, 64)),
    ],
)
def test_simulated_nodes_send_the_predicted_bytes(nodes: int, density: float) -> None:
    simulator = Simulator(1, Link(0.0005))
    hosts = simulator.mesh(nodes)
    given = job(nodes=nodes, owners=nodes, frame_bytes=0, density=density)
    part_bytes = round(cost.message_bytes(given.elements / nodes, given.density))

    def sent(topology: cost.Topology) -> float:
        before = [host.endpoint.stats().udp_bytes_sent for host in hosts]
        expected = len(hosts[0].received)
        size = round(cost.message_bytes(given.elements, given.density))
        if topology == "sharded":
            size = round(cost.message_bytes(given.elements / nodes, owners_density(given.density)))
            for host in hosts:
                for peer in host.endpoint.peers:
                    simulator.publish(host, bytes(part_bytes), to=peer)
            expected += nodes - 1
            simulator.run_until(lambda: all(len(one.received) == expected for one in hosts), 60.0)
        for host in hosts:
            simulator.publish(host, bytes(size))
        expected += nodes - 1
        simulator.run_until(lambda: all(len(one.received) == expected for one in hosts), 60.0)
        simulator.run_for(0.05)
        after = [host.endpoint.stats().udp_bytes_sent for host in hosts]
        return (sum(after) - sum(before)) / nodes

    for topology in ("mesh", "sharded"):
        assert sent(topology) == pytest.approx(exchange(given, topology).sent_bytes, rel=0.1)


def test_a_mesh_s_bytes_grow_with_the_nodes_and_a_sharded_exchange_s_do_not() -> None:
    def received(topology: Any, nodes: int) -> float:
        given = job(nodes=nodes, owners=nodes)
        return exchange(given, topology).received_bytes

    assert received("mesh", 16) == pytest.approx(5 * received("mesh", 4))
    assert received("sharded", 16) <= 1.35 * received("sharded", 4)
    assert received("mesh", 16) >= 6 * received("sharded", 16)


def test_a_dense_sharded_exchange_moves_what_a_ring_moves() -> None:
    given = job(nodes=8)
    ring = dense_ring(given)
    assert exchange(given, "sharded", "dense").sent_bytes == pytest.approx(
        ring.sent_bytes, rel=0.08
    )
    assert exchange(given, "mesh", "dense").sent_bytes == pytest.approx(
        4 * ring.sent_bytes, rel=0.08
    )


def test_without_costs_of_the_machine_only_link_and_latency_remain() -> None:
    given = job(rates=FREE, latency_s=0.01)
    one = exchange(given)
    assert one.link_s == pytest.approx(one.sent_bytes / 12.5e6)
    assert one.step_s == pytest.approx(0.1 + one.link_s + 0.01)
    assert one.limit == "compute"
    assert exchange(replace(given, link_bytes_per_s=1e5)).limit == "link"
    assert exchange(replace(given, latency_s=5.0)).limit == "latency"


def test_local_steps_and_overlap_take_their_share_of_the_costs() -> None:
    given = job(rates=FREE, latency_s=0.0, link_bytes_per_s=1e5)
    one, four = exchange(given), exchange(given, every=4)
    assert four.sent_bytes == one.sent_bytes / 4
    assert four.step_s == pytest.approx(0.1 + (one.step_s - 0.1) / 4)
    hidden = exchange(given, every=4, overlap=3)
    assert hidden.hidden_s == pytest.approx(0.3 / 4)
    assert hidden.step_s == pytest.approx(four.step_s - 0.3 / 4)
    slow = replace(given, step_s=1e3)
    assert exchange(slow, overlap=1).step_s == pytest.approx(1e3)


def test_a_ring_hides_all_but_its_last_bucket_behind_the_backward_pass() -> None:
    small, large = job(elements=1_000_000, step_s=10.0), job(elements=100_000_000, step_s=1e4)
    assert dense_ring(small).hidden_s == 0.0
    ring = dense_ring(large)
    whole_s = ring.link_s + ring.apply_s + ring.latency_s
    assert ring.step_s - 1e4 == pytest.approx(whole_s * (25 << 20) / 4e8)
    assert ring.hidden_s == pytest.approx(whole_s - (ring.step_s - 1e4))


@pytest.mark.parametrize("step_s", [0.0, 0.2, 10.0])
@pytest.mark.parametrize("link_bytes_per_s", [1e6, 1e9, 1e12])
def test_a_ring_of_float16_is_never_slower(step_s: float, link_bytes_per_s: float) -> None:
    given = job(elements=25_000_000, step_s=step_s, link_bytes_per_s=link_bytes_per_s)
    assert dense_ring(given, 2).step_s <= dense_ring(given).step_s


def test_whole_updates_are_never_faster_than_sparse_ones() -> None:
    for elements, nodes, mbit in itertools.product(
        (10**4, 10**6, 10**9), (2, 8, 64), (10, 1e3, 1e5)
    ):
        for density, topology in itertools.product((0.01, 0.2, 0.4), ("mesh", "sharded")):
            given = job(
                elements=elements,
                nodes=nodes,
                density=density,
                step_s=0.0,
                link_bytes_per_s=mbit * 125e3,
            )
            sparse = exchange(given, topology)  # type: ignore[arg-type]
            for codec in ("dense", "bfloat16"):
                assert sparse.step_s < exchange(given, topology, codec).step_s  # type: ignore[arg-type]


def test_workers_of_a_machine_add_no_bytes_to_an_exchange() -> None:
    one, eight = exchange(job()), exchange(job(workers=8))
    assert eight.sent_bytes == one.sent_bytes
    assert eight.team_s > one.team_s == 0.0


def test_the_crossover_is_where_both_take_as_long() -> None:
    given = job(elements=25_000_000, nodes=8)
    rate = cost.crossover(given)
    there = replace(given, link_bytes_per_s=rate)
    ours = exchange(there, cost.topology_of(there))
    assert ours.step_s == pytest.approx(dense_ring(there).step_s, rel=1e-3)
    assert cost.crossover(replace(given, rates=FREE, latency_s=0.0)) == math.inf
    # A message of a few elements is nearly all header.
    assert cost.crossover(job(elements=10, nodes=2)) == 0.0


def test_other_schemes_take_the_bytes_that_their_papers_give() -> None:
    # Two factors of rank 4 for a matrix, and a bias whole, in a ring of 2: once each way.
    assert cost.powersgd_bytes([(100, 20, 5), (7,)], 4, 2) == 4 * (4 * 200 + 7)
    assert cost.one_bit_bytes(8_000, 2) == 1_000
    assert cost.ok_topk_bytes(1_000_000, 0.01, 2) == (40_000, 120_000)


@pytest.mark.parametrize(
    ("bytes_of", "complaint"),
    [
        (lambda: cost.powersgd_bytes([(3, 4)], -1, 2), "rank is -1"),
        (lambda: cost.powersgd_bytes([(3, 4)], 1, 0), "nodes is 0"),
        (lambda: cost.one_bit_bytes(-1, 2), "elements is -1"),
        (lambda: cost.one_bit_bytes(1, 0), "nodes is 0"),
        (lambda: cost.ok_topk_bytes(-1, 0.1, 2), "elements is -1"),
        (lambda: cost.ok_topk_bytes(1, -0.1, 2), "density is -0.1"),
        (lambda: cost.ok_topk_bytes(1, 0.1, 0), "nodes is 0"),
        (lambda: cost.message_bytes(-1, 0.1), "elements is -1"),
        (lambda: cost.message_bytes(100, 1.1), "density is 1.1"),
        (lambda: cost.transfer_bytes(-1, job()), "payload_bytes is -1"),
        (lambda: cost.dl4j_scalability(service_ms=-600), "service_ms is -600"),
        (lambda: cost.dl4j_scalability(encode_ms=-1), "encode_ms is -1"),
        (lambda: cost.dl4j_scalability(decode_ms=math.nan), "decode_ms is nan"),
    ],
)
def test_other_schemes_refuse_impossible_numbers_by_name(
    bytes_of: Callable[[], Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        bytes_of()


def test_deeplearning4j_s_form_gives_its_documentation_s_figure() -> None:
    assert cost.dl4j_scalability() == pytest.approx(550 / 780)
    with pytest.raises(ValueError, match="nodes is 0"):
        cost.dl4j_scalability(nodes=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("elements", 0),
        ("nodes", 1),
        ("step_s", -1.0),
        ("step_s", math.nan),
        ("link_bytes_per_s", 0.0),
        ("link_bytes_per_s", math.inf),
        ("latency_s", -1e-3),
        ("workers", 0),
        ("density", 0.0),
        ("density", 1.5),
        ("owners", 5),
        ("frame_bytes", -1),
        ("elements", 10**400),
        ("step_s", 10**400),
    ],
)
def test_impossible_numbers_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is "):
        job(**{name: value})
    with pytest.raises(ValueError, match="overlap is 2, must be from 0 to 1"):
        exchange(job(), overlap=2)
    with pytest.raises(ValueError, match="message_s is -1"):
        Rates(message_s=-1.0)


def test_the_machine_is_measured_once_and_the_rates_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "_NUMEL", 1 << 16)
    monkeypatch.setattr(calibration, "_EACH_S", 0.0)
    found = calibration.rates()
    assert all(0.0 <= getattr(found, name) < 0.1 for name in Rates.__dataclass_fields__)
    assert found.message_s > 0.0
    monkeypatch.setattr(calibration, "measure", lambda: pytest.fail("measured again"))
    assert calibration.rates() == found
    path = calibration.cache_path()
    assert path.is_relative_to(tmp_path)
    monkeypatch.setattr(calibration, "measure", lambda: FREE)
    path.write_text(json.dumps({"of": "another version"}))
    assert calibration.rates() == FREE


def test_a_user_without_a_home_gets_measured_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    monkeypatch.setattr(calibration, "measure", lambda: FREE)
    assert calibration.rates() == FREE


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"elements": "1000"}, "elements must be a number, got '1000'"),
        ({"step_s": None}, "step_s must be a number, got None"),
        ({"density": True}, "density must be a number, got True"),
        ({"rates": None}, "rates must be Rates, got None"),
    ],
)
def test_jobs_of_the_wrong_kinds_are_refused_by_name(options: Any, complaint: str) -> None:
    numbers = {"elements": 1000, "nodes": 4, "step_s": 0.1, "link_bytes_per_s": 1e8}
    with pytest.raises(TypeError, match=complaint):
        Job(**{**numbers, **options})


def test_unknown_exchanges_have_no_cost() -> None:
    job = Job(elements=1000, nodes=4, step_s=0.1, link_bytes_per_s=1e8)
    with pytest.raises(ValueError, match="topology is 'ring', must be 'mesh' or 'sharded'"):
        exchange(job, "ring")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="codec is 'float16', must be one of threshold, dense"):
        exchange(job, codec="float16")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="every must be a number, got '4'"):
        exchange(job, every="4")  # type: ignore[arg-type]
