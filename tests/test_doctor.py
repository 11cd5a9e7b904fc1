"""``gradwire doctor``: checks of this machine, and of a link between two processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradwire.cli import main
from gradwire.cli.doctor import link, machine
from gradwire.cli.doctor.machine import BUFFER_BYTES, Check
from gradwire.cli.run import free_port
from gradwire.errors import NotConnected, WouldBlock
from gradwire.shared_memory import Usage
from gradwire.transport import Node, SocketStats, Ticket, generate_secret, parse_secret
from gradwire.transport.secret import fingerprint

SECRET_TEXT = generate_secret()
SECRET = parse_secret(SECRET_TEXT)

FLOW = link.Flow(bytes_per_s=1.2e9, resent_share=1e-5)
LINK = link.Link(
    peer="10.1.1.9:40123",
    round_trip_p50_s=1e-4,
    round_trip_p99_s=2e-4,
    out=FLOW,
    back=FLOW,
    clock_ahead_s=-1.0,
    has_gso=True,
)
SOCKET = SocketStats(
    has_gso=True,
    has_gro=True,
    receive_buffer_bytes=2 * BUFFER_BYTES,
    send_buffer_bytes=2 * BUFFER_BYTES,
)


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_SECRET", SECRET_TEXT)
    monkeypatch.delenv("GRADWIRE_SECRET_FILE", raising=False)
    for name in ("RANK", "WORLD_SIZE", "GRADWIRE_PEERS", "GRADWIRE_BIND", "GRADWIRE_MIN_PEERS"):
        monkeypatch.delenv(name, raising=False)


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_a_good_link_gets_nothing_but_ok() -> None:
    checks = list(link.judge(LINK))
    assert {check.verdict for check in checks} == {"ok"}
    assert all(check.helps == () for check in checks)
    assert "1,200.0 MB/s in messages of 1 MB" in [check.says for check in checks]


@pytest.mark.parametrize(
    ("change", "name", "help_"),
    [
        ({"clock_ahead_s": 200.0}, "wall clocks", "timedatectl"),
        ({"has_gso": False}, "GSO on the link", "ethtool -K tx on INTERFACE"),
        ({"round_trip_p99_s": 0.2}, "round trip", "other load"),
        ({"out": replace(FLOW, resent_share=0.05)}, "loss to the peer", "ip route get 10.1.1.9"),
        (
            {"back": replace(FLOW, resent_share=0.05, kernel_drops=9)},
            "loss from the peer",
            "larger socket buffers",
        ),
    ],
)
def test_a_poor_link_is_slow_and_says_what_to_look_at(
    change: dict[str, Any], name: str, help_: str
) -> None:
    checks = {check.name: check for check in link.judge(replace(LINK, **change))}
    assert checks[name].verdict == "slow"
    assert help_ in "\n".join(checks[name].helps)
    assert {check.verdict for other, check in checks.items() if other != name} == {"ok"}


@pytest.mark.parametrize(
    ("check", "verdict", "help_"),
    [
        (machine.check_instruction_set("avx2", ["scalar", "avx2"]), "ok", ""),
        (machine.check_instruction_set("scalar", ["scalar", "avx2"]), "slow", "unset GRADWIRE_ISA"),
        (machine.check_instruction_set("scalar", ["scalar"]), "ok", ""),
        (machine.check_encryption(8e9), "ok", ""),
        (machine.check_encryption(2e8), "slow", "grep -m1 -o -w aes /proc/cpuinfo"),
        (machine.check_shared_memory(Usage(5, 0), (1 << 30, 0, 1 << 30)), "ok", ""),
        (machine.check_shared_memory(Usage(5, 7), (1 << 30, 0, 9)), "slow", "free_leftovers"),
        (machine.check_shared_memory(Usage(0, 0), (64 << 20, 0, 9)), "slow", "--shm-size"),
        (machine.check_clock(1.8e9), "ok", ""),
        (machine.check_clock(86_400.0), "FAIL", "timedatectl"),
    ],
)
def test_a_finding_is_named_with_what_helps(check: Check, verdict: str, help_: str) -> None:
    assert check.verdict == verdict
    assert help_ in "\n".join(check.helps)
    assert bool(help_) == bool(check.helps)


@pytest.mark.parametrize(
    ("change", "platform", "buffers", "offloads"),
    [
        ({}, "linux", "ok", "ok"),
        ({"has_gro": False}, "linux", "ok", "slow"),
        ({"receive_buffer_bytes": 425_984}, "linux", "slow", "ok"),
        ({"receive_buffer_bytes": BUFFER_BYTES, "has_gso": False}, "darwin", "ok", "n/a"),
        ({"send_buffer_bytes": BUFFER_BYTES >> 1}, "darwin", "slow", "n/a"),
    ],
)
def test_a_socket_is_checked_by_what_the_system_grants(
    change: dict[str, Any], platform: str, buffers: str, offloads: str
) -> None:
    checks = list(machine.check_socket(replace(SOCKET, **change), platform))
    assert [check.verdict for check in checks] == [buffers, offloads]


def test_only_the_limit_that_is_too_low_is_to_be_raised() -> None:
    found = replace(SOCKET, receive_buffer_bytes=425_984)
    (help_,) = next(machine.check_socket(found, "linux")).helps
    assert help_.startswith(f"sudo sysctl -w net.core.rmem_max={BUFFER_BYTES} ")


# --- this machine -----------------------------------------------------------------------------------------------------


def test_a_secret_is_described_without_being_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    check = machine.check_secret(needs_it=True)
    assert check.verdict == "ok"
    assert fingerprint(SECRET) in check.says
    assert SECRET_TEXT not in check.says
    monkeypatch.setenv("GRADWIRE_SECRET", "AA" * 31)
    assert machine.check_secret(needs_it=False).verdict == "FAIL"
    monkeypatch.delenv("GRADWIRE_SECRET")
    assert machine.check_secret(needs_it=False).verdict == "n/a"
    missing = machine.check_secret(needs_it=True)
    assert missing.verdict == "FAIL"
    assert "gradwire secret" in missing.helps[0]


def test_the_remedy_for_a_secret_is_not_refused_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside GRADWIRE_SECRET_FILE, GRADWIRE_SECRET is one too many."""
    monkeypatch.setenv("GRADWIRE_SECRET", "shorter=")
    check = machine.check_secret(needs_it=True)
    assert "the cluster secret in GRADWIRE_SECRET has " in check.says
    assert check.helps == (machine.REMEDY,)
    monkeypatch.setenv("GRADWIRE_SECRET_FILE", str(tmp_path / "secret"))
    check = machine.check_secret(needs_it=True)
    assert "unset one" in check.says
    assert check.helps == ("unset GRADWIRE_SECRET_FILE",)
    monkeypatch.delenv("GRADWIRE_SECRET")
    check = machine.check_secret(needs_it=True)
    assert f"{tmp_path / 'secret'} cannot be read" in check.says
    assert check.helps == (f"unset GRADWIRE_SECRET_FILE; {machine.REMEDY}",)


def test_the_address_comes_with_the_reason_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def says(bind: str, mask: str | None, peer: str | None) -> str:
        return next(machine.check_binding(bind, mask, peer)).says

    monkeypatch.delenv("GRADWIRE_IP", raising=False)
    assert says("127.0.0.1:0", None, None) == "127.0.0.1: given by --bind 127.0.0.1:0"
    assert says("0.0.0.0:0", "127.0.0.0/8", None).endswith("the one address inside 127.0.0.0/8")
    assert says("0.0.0.0:0", None, "127.0.0.1:1") == "127.0.0.1: on the route to 127.0.0.1:1"
    assert says("0.0.0.0:40123", None, None).startswith("0.0.0.0: every address of this machine")
    monkeypatch.setenv("GRADWIRE_IP", "127.0.0.1")
    assert says("0.0.0.0:0", None, None) == "127.0.0.1: GRADWIRE_IP is 127.0.0.1"


@pytest.mark.parametrize(
    ("variables", "verdict", "says"),
    [
        ({}, "n/a", "no variables"),
        (
            {
                "RANK": "3",
                "WORLD_SIZE": "8",
                "LOCAL_RANK": "1",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "host0",
                "MASTER_PORT": "29500",
            },
            "ok",
            "RANK and WORLD_SIZE: rank 3 of 8; local rank 1 of 2; binds 0.0.0.0:0; peers host0:29500; "
            "waits for 3 other nodes",
        ),
        (
            {"GRADWIRE_PEERS": "10.1.1.7:1"},
            "ok",
            "binds 0.0.0.0:0; peers 10.1.1.7:1; waits for 1 other node",
        ),
        ({"RANK": "1"}, "FAIL", "RANK is 1, but WORLD_SIZE is not set"),
        ({"SLURM_PROCID": "1"}, "FAIL", "SLURM_NTASKS is not set"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "FAIL", "nothing says where"),
        ({"GRADWIRE_PEERS": ""}, "FAIL", "trains alone"),
        ({"GRADWIRE_PEERS": "a,b"}, "FAIL", "address 'a' is not of the form host:port"),
        ({"GRADWIRE_PEERS": "a:0"}, "FAIL", "GRADWIRE_PEERS: address 'a:0' must have a name"),
        ({"GRADWIRE_BIND": "1:2:3"}, "FAIL", "address '1:2:3'"),
    ],
)
def test_the_place_in_a_run_is_what_a_training_would_take(
    variables: dict[str, str], verdict: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check = machine.check_launcher()
    assert check.verdict == verdict
    assert says in check.says


def test_the_address_is_not_that_of_a_route_to_an_unknown_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GRADWIRE_IP", raising=False)
    address, port = machine.check_binding("0.0.0.0:0", None, "nohost.invalid:1")
    assert (address.verdict, port.verdict) == ("n/a", "ok")
    assert "address 'nohost.invalid:1' cannot be resolved" in address.says


def test_a_port_in_use_and_an_impossible_mask_are_found() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = machine.check_port(taken.getsockname())
    assert port.verdict == "FAIL"
    assert "sudo ss -ulpn" in port.helps[0]
    (address,) = machine.check_binding("0.0.0.0:0", "203.0.113.0/24", None)
    assert address.verdict == "FAIL"
    assert "203.0.113.0/24" in address.says


def test_a_socket_is_looked_at_on_loopback() -> None:
    stats = machine.socket_stats()
    assert stats.receive_buffer_bytes > 0
    if sys.platform == "linux":
        assert stats.has_gso
        assert stats.has_gro


# --- the link ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[link.End, link.End]]:
    secret = link.doctors_secret(SECRET)
    with (
        Node("127.0.0.1:0", secret=secret) as one,
        Node("127.0.0.1:0", [one.address], secret=secret) as two,
    ):
        one.wait_for_peers(1, 10.0)
        two.wait_for_peers(1, 10.0)
        yield link.End(one), link.End(two)


@pytest.mark.parametrize(
    ("question", "complaint"),
    [
        (b"no JSON", "does not know"),
        (b"[]", "does not know"),
        (b'{"do": "dance", "seconds": 0}', "dance"),
        (b"[" * 100_000, "too many"),
        (b'{"do": "send", "seconds": 1e9}', "at most 60"),
        (b'{"do": "send", "seconds": NaN}', "at most 60"),
    ],
)
def test_a_question_that_is_unknown_or_too_large_is_refused(
    ends: tuple[link.End, link.End], question: bytes, complaint: str
) -> None:
    one, two = ends
    two.node.publish(question, link.ASK)
    answers: list[Any] = []
    end_s = time.monotonic() + 10.0
    while not answers and time.monotonic() < end_s:
        link.answer(one, timeout_s=0.05)
        answers = two.node.receive(timeout_s=0.05)
    assert complaint in json.loads(bytes(answers[0].payload))["error"]


def test_a_peer_that_does_not_answer_ends_the_test(
    ends: tuple[link.End, link.End], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = ends
    monkeypatch.setattr(link, "ANSWER_S", 0.1)
    with pytest.raises(link.LinkError, match="has not answered"):
        link.ask(two, two.node.peers[0], "state")
    one.node.close(timeout_s=0.1)
    peer = one.node.peer
    while two.node.peers:
        two.node.receive(timeout_s=0.05)
    with pytest.raises((link.LinkError, NotConnected)):
        link.ask(two, peer, "state")


@contextmanager
def answering(end: link.End) -> Iterator[None]:
    """Answer questions for two seconds, meanwhile."""
    thread = threading.Thread(target=lambda: [link.answer(end, 0.05) for _ in range(40)])
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_a_peer_that_sends_has_the_time_to_say_that_nothing_arrives(
    ends: tuple[link.End, link.End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where large datagrams are lost on the way back only, the peer alone knows it."""
    one, two = ends
    monkeypatch.setattr(link, "ANSWER_S", 0.9)
    monkeypatch.setattr(link, "STALL_S", 2.0)
    publish = Node.publish

    def lose_bulk(node: Node, payload: Any, tag: int = 0, **options: Any) -> Ticket:
        if tag == link.BULK:
            return Ticket(link.BULK, 1, frozenset([options["to"]]))
        return publish(node, payload, tag, **options)

    monkeypatch.setattr(Node, "publish", lose_bulk)
    with (
        answering(one),
        pytest.raises(link.LinkError, match=r"acknowledged nothing .* drops datagrams"),
    ):
        link.ask(two, two.node.peers[0], "send", 0.1)


def test_a_peer_that_cannot_send_says_so_after_it_has_waited_for_others(
    ends: tuple[link.End, link.End], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A doctor that was killed acknowledges nothing, and the node keeps what follows until it is lost."""
    one, two = ends
    publish = Node.publish
    calls = []

    def drain(node: Node, timeout_s: float) -> bool:  # noqa: ARG001
        calls.append("drain")
        return False

    def fill(node: Node, payload: Any, tag: int = 0, **options: Any) -> Ticket:
        if tag == link.BULK:
            calls.append("send")
            raise WouldBlock("the send log is full")
        return publish(node, payload, tag, **options)

    monkeypatch.setattr(Node, "drain", drain)
    monkeypatch.setattr(Node, "publish", fill)
    monkeypatch.setattr(link, "ANSWER_S", 2.0)
    monkeypatch.setattr(link, "STALL_S", 0.0)
    with (
        answering(one),
        pytest.raises(link.LinkError, match=r"127\.0\.0\.1:.*: the send log is full"),
    ):
        link.ask(two, two.node.peers[0], "send", 0.1)
    assert calls == ["drain", "send"]


def test_a_doctor_is_to_serve_at_the_ip_version_at_which_it_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "CONNECT_S", 0.1)
    for target, there in (("[::1]:9", "[::]:9"), ("127.0.0.1:9", "0.0.0.0:9")):
        bind = "[::]:0" if "[" in target else "0.0.0.0:0"
        [check], _ = link.check(target, 0.1, bind, None)
        assert f"gradwire doctor --serve --bind {there} " in check.helps[0]


def test_a_link_that_drops_large_datagrams_ends_the_test_with_a_hint(
    ends: tuple[link.End, link.End], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = ends
    [there] = two.node.peers
    monkeypatch.setattr(link, "STALL_S", 0.2)
    monkeypatch.setattr(Node, "publish", lambda *_, **__: Ticket(link.BULK, 1, frozenset([there])))
    with pytest.raises(link.LinkError, match=r"acknowledged nothing .* drops datagrams of 1200 b"):
        two.send_bulk(there, 0.1)
    assert one.node.peers


@pytest.fixture
def server() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A doctor that serves in a process of its own, and its address."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "gradwire", "doctor", "--serve", "--bind", address]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        assert any(line.startswith(f"serving at {address}") for line in process.stdout)
        yield address, process
    finally:
        process.kill()
        process.communicate()


def test_two_doctors_test_the_link_between_them(
    server: tuple[str, subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    address, process = server
    assert main(["doctor", address, "--seconds", "0.1", "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert found["ok"]
    assert SECRET_TEXT not in text
    assert SECRET.hex() not in text
    verdict_of = {check["name"]: check["verdict"] for check in found["checks"]}
    assert verdict_of["peer"] == verdict_of["wall clocks"] == "ok"
    assert "FAIL" not in verdict_of.values()
    measured = found["link"]
    assert measured["out"]["bytes_per_s"] > 0
    assert measured["back"]["bytes_per_s"] > 0
    assert 0 < measured["round_trip_p50_s"] <= measured["round_trip_p99_s"]
    assert link.measure(address, seconds=0.1).peer == address
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=30.0)
    assert process.returncode == 0
    assert rest.splitlines()[-1] == "done"


def test_a_node_of_the_cluster_does_not_answer_a_doctor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "CONNECT_S", 0.3)
    with Node("127.0.0.1:0", secret=SECRET) as node:
        address = node.address
        assert main(["doctor", address]) == 1
        assert node.events() == []
    out = capsys.readouterr().out
    assert f"{address} does not answer" in out
    assert fingerprint(SECRET) in out
    assert out.splitlines()[-1] == "does not work: peer"
    if sys.platform == "linux":
        (check,), measured = link.check(address, 0.1, "127.0.0.1:0", None)
        assert check.says.startswith("no program listens")
        assert measured is None


# --- the command ------------------------------------------------------------------------------------------------------


def test_without_a_peer_the_doctor_looks_at_this_machine_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--bind", "127.0.0.1:0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("instruction set", "encryption", "secret", "socket buffers", "GSO, GRO", "clock"):
        assert any(name + ":" in line for line in lines)
    assert lines[-1] == "all is well" or lines[-1].startswith("works; costs speed: ")


def test_a_launcher_s_leftovers_end_with_status_1_and_the_link_is_tested_all_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert main(["doctor", "--bind", "127.0.0.1:0"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "does not work: launcher"
    monkeypatch.setattr(link, "CONNECT_S", 0.1)
    assert main(["doctor", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "does not work: launcher, peer"


def test_port_0_of_a_peer_is_nothing_to_connect_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "127.0.0.1:0"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "nothing can be reached at port 0" in captured.err


@pytest.mark.parametrize("arguments", [[""], ["--bind", ""]])
def test_an_empty_address_is_refused_and_not_taken_for_none(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "address '' is not of the form host:port" in captured.err


def test_a_peer_without_a_secret_ends_with_status_1_and_the_command_that_makes_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRADWIRE_SECRET")
    assert main(["doctor", "127.0.0.1:1", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (secret,) = [check for check in found["checks"] if check["name"] == "secret"]
    assert secret["verdict"] == "FAIL"
    assert not found["ok"]
    assert found["link"] is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["--serve", "127.0.0.1:1"],
        ["--serve", "--json"],
        ["--bind", "nowhere"],
        ["a-name-without-a-port"],
    ],
)
def test_arguments_that_do_not_fit_end_with_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    assert capsys.readouterr().err.startswith("gradwire doctor: ")


@pytest.mark.parametrize("seconds", ["0", "-1", "61", "nan", "soon"])
def test_a_measurement_takes_up_to_a_minute(seconds: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--seconds", seconds])
