"""``gradwire doctor``: from facts to verdicts, who is at an address, and a link between two processes."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from gradwire.cli import main
from gradwire.cli.doctor import gather, link, report, tcp, verdicts
from gradwire.cli.doctor.facts import (
    Binding,
    Clocks,
    Drops,
    Flow,
    Installation,
    Link,
    Machine,
    Secret,
    Socket,
)
from gradwire.cli.doctor.knock import doctors_secret, knock
from gradwire.errors import NotConnected
from gradwire.transport import Node, generate_secret, parse_secret
from gradwire.transport.model import parse_address
from gradwire.transport.secret import fingerprint

SECRET_TEXT = generate_secret()
SECRET = parse_secret(SECRET_TEXT)
MEGABYTE = 1 << 20

MACHINE = Machine(
    system="Linux",
    installation=Installation(
        gradwire="0.1.0",
        backends=("scalar", "avx2"),
        instruction_set="avx2",
        instruction_set_problem="",
        cryptography="47.0.0",
        seals_in_place=True,
        aes_bytes_per_s=8e9,
    ),
    secret=Secret(is_set=True, fingerprint="0a1b2c3d"),
    binding=Binding(
        asked="0.0.0.0:40123",
        address="10.1.1.7:40123",
        rule="mask",
        detail="10.1.1.0/24",
        interface="eth1",
        interface_mtu=1_500,
        interface_mbit=10_000,
    ),
    socket=Socket(
        wanted_bytes=4 * MEGABYTE,
        receive_bytes=4 * MEGABYTE,
        send_bytes=4 * MEGABYTE,
        receive_bytes_max=8 * MEGABYTE,
        send_bytes_max=8 * MEGABYTE,
        has_gso=True,
        has_gro=True,
        datagrams_per_receive=40.0,
    ),
    clocks=Clocks(step_s=1e-7, wall_s=1.8e9),
    drops=Drops(received=1_000_000, dropped=3),
    switch_interval_s=5e-4,
    cpus=8,
)
FLOW = Flow(
    seconds=2.0,
    sent_bytes=2_000 * MEGABYTE,
    received_bytes=2_000 * MEGABYTE,
    datagrams=1_500_000,
    resent_datagrams=10,
    kernel_drops=0,
    sender_cpu=0.6,
    receiver_cpu=0.7,
    tcp_bytes_per_s=1.2e9,
)
LINK = Link(
    peer="10.1.1.9:40123",
    round_trips_s=tuple(1e-4 + 1e-6 * number for number in range(100)),
    out=FLOW,
    back=FLOW,
    path_bytes=1_472,
    route_mtu=1_500,
    peer_mbit=10_000,
    has_gso=True,
)


def judged(machine: Machine, *, needs_secret: bool = True) -> dict[str, verdicts.Check]:
    return {
        check.name: check for check in verdicts.judge_machine(machine, needs_secret=needs_secret)
    }


def judged_link(link_: Link, machine: Machine = MACHINE) -> dict[str, verdicts.Check]:
    return {check.name: check for check in verdicts.judge_link(link_, machine)}


# --- from facts to verdicts -------------------------------------------------------------------------------------------


def test_a_good_machine_and_a_good_link_get_nothing_but_ok() -> None:
    checks = [*judged(MACHINE).values(), *judged_link(LINK).values()]
    assert {check.verdict for check in checks} == {"ok"}
    assert all(check.helps == () for check in checks)
    assert report.conclusion(checks) == "all is well"


INSTALLATION, SOCKET, BINDING = MACHINE.installation, MACHINE.socket, MACHINE.binding
assert SOCKET is not None


@pytest.mark.parametrize(
    ("name", "verdict", "help_", "change"),
    [
        (
            "instruction set",
            "FAIL",
            "unset GRADWIRE_ISA",
            {"installation": replace(INSTALLATION, instruction_set_problem="no abacus here")},
        ),
        (
            "instruction set",
            "slow",
            "unset GRADWIRE_ISA",
            {"installation": replace(INSTALLATION, instruction_set="scalar")},
        ),
        (
            "cryptography",
            "slow",
            "python -m pip install --upgrade 'cryptography>=47'",
            {"installation": replace(INSTALLATION, seals_in_place=False)},
        ),
        (
            "encryption",
            "slow",
            "grep -m1 -o -w aes /proc/cpuinfo",
            {"installation": replace(INSTALLATION, aes_bytes_per_s=2e8)},
        ),
        ("secret", "FAIL", "gradwire secret", {"secret": Secret(is_set=False)}),
        ("secret", "FAIL", "gradwire secret", {"secret": Secret(is_set=True, problem="31 bytes")}),
        (
            "interface",
            "FAIL",
            "ip -brief address",
            {"binding": replace(BINDING, address="", problem="no local address is in it")},
        ),
        (
            "port",
            "FAIL",
            "sudo ss -ulpn 'sport = :40123'",
            {"binding": replace(BINDING, problem="in use", error_number=errno.EADDRINUSE)},
        ),
        (
            "port",
            "FAIL",
            "choose a port above 1023",
            {"binding": replace(BINDING, problem="not allowed", error_number=errno.EACCES)},
        ),
        (
            "socket buffers",
            "slow",
            "sudo sysctl -w net.core.rmem_max=4194304 net.core.wmem_max=4194304",
            {
                "socket": replace(
                    SOCKET,
                    receive_bytes=212_992,
                    send_bytes=212_992,
                    receive_bytes_max=212_992,
                    send_bytes_max=212_992,
                )
            },
        ),
        (
            "socket buffers",
            "slow",
            "sudo sysctl -w net.core.rmem_max=4194304",
            {"socket": replace(SOCKET, receive_bytes=212_992, receive_bytes_max=212_992)},
        ),
        ("GSO, GRO", "slow", "uname -r", {"socket": replace(SOCKET, has_gro=False)}),
        ("kernel drops", "slow", "nstat", {"drops": Drops(received=1_000, dropped=1)}),
        ("clock", "slow", "", {"clocks": Clocks(step_s=0.015, wall_s=1.8e9)}),
        ("wall clock", "FAIL", "timedatectl", {"clocks": Clocks(step_s=1e-9, wall_s=86_400.0)}),
        ("switch interval", "slow", "setswitchinterval(5e-4)", {"switch_interval_s": 5e-3}),
        ("processors", "slow", "", {"cpus": 1}),
    ],
)
def test_what_is_wrong_is_named_with_what_helps(
    name: str, verdict: str, help_: str, change: dict[str, object]
) -> None:
    checks = judged(replace(MACHINE, **change))  # type: ignore[arg-type]
    assert checks[name].verdict == verdict
    assert help_ in "\n".join(checks[name].helps)
    others = {check.verdict for other, check in checks.items() if other != name}
    assert others <= {"ok", "n/a"}
    assert report.is_well(list(checks.values())) == (verdict != "FAIL")


def test_only_the_limit_that_is_too_low_is_to_be_raised() -> None:
    found = replace(SOCKET, receive_bytes=212_992, receive_bytes_max=212_992)
    assert "wmem_max" not in "\n".join(verdicts.judge_buffers(found, "Linux").helps)


def test_a_missing_secret_is_no_failure_until_it_is_needed() -> None:
    machine = replace(MACHINE, secret=Secret(is_set=False))
    assert judged(machine, needs_secret=False)["secret"].verdict == "n/a"
    assert judged(machine, needs_secret=True)["secret"].verdict == "FAIL"


def test_on_macos_what_linux_has_does_not_apply_and_other_commands_help() -> None:
    small = replace(SOCKET, receive_bytes=MEGABYTE, receive_bytes_max=None, send_bytes_max=None)
    machine = replace(MACHINE, system="Darwin", socket=small, drops=None)
    checks = judged(machine)
    assert checks["GSO, GRO"].verdict == checks["kernel drops"].verdict == "n/a"
    assert checks["socket buffers"].helps == ("sudo sysctl -w kern.ipc.maxsockbuf=8388608",)
    in_use = replace(BINDING, problem="in use", error_number=errno.EADDRINUSE)
    assert verdicts.judge_port(in_use, "Darwin").helps == ("lsof -nP -iUDP:40123",)
    assert "GSO on the link" not in judged_link(replace(LINK, has_gso=False), machine)


@pytest.mark.parametrize(
    ("rule", "detail", "reason"),
    [
        ("bind", "", "given by --bind 0.0.0.0:40123"),
        ("mask", "10.1.1.0/24", "the one address inside 10.1.1.0/24"),
        ("variable", "10.1.1.7", "GRADWIRE_IP is 10.1.1.7"),
        ("route", "10.1.1.9:1", "on the route to 10.1.1.9:1"),
    ],
)
def test_the_address_comes_with_the_reason_for_it(rule: str, detail: str, reason: str) -> None:
    binding = replace(BINDING, rule=rule, detail=detail)  # type: ignore[arg-type]
    check = verdicts.judge_interface(binding)
    assert check.verdict == "ok"
    assert check.says == f"10.1.1.7 on eth1: {reason}, MTU 1500, 10000 Mbit/s"


@pytest.mark.parametrize(
    ("reached", "verdict", "help_"),
    [
        ("doctor", "ok", ""),
        ("node", "ok", "gradwire doctor --serve --bind 0.0.0.0:40123"),
        ("refused", "FAIL", "gradwire doctor --serve --bind 0.0.0.0:40123"),
        ("silent", "FAIL", "udp dport 40123 accept"),
        ("unknown host", "FAIL", "getent hosts 10.1.1.9"),
    ],
)
def test_who_answers_decides_whether_the_peer_is_reached(
    reached: verdicts.Reached, verdict: str, help_: str
) -> None:
    check = verdicts.judge_reached("10.1.1.9:40123", reached, "0a1b2c3d")
    assert check.verdict == verdict
    assert help_ in "\n".join(check.helps)


def test_a_silent_peer_may_have_another_secret_so_the_fingerprint_is_shown() -> None:
    check = verdicts.judge_reached("10.1.1.9:40123", "silent", "0a1b2c3d")
    assert "0a1b2c3d" in "\n".join(check.helps)


@pytest.mark.parametrize(
    ("change", "verdict", "reason"),
    [
        ({}, "ok", "87% of TCP's 1.20 GB/s"),
        ({"received_bytes": 1}, "FAIL", "1 of 2097152000 bytes came"),
        ({"seconds": 4.0}, "slow", "44% of TCP's 1.20 GB/s"),
        ({"seconds": 4.0, "receiver_cpu": 0.95}, "ok", "the receiver's processor is the bound"),
        ({"tcp_bytes_per_s": None}, "ok", "84% of the interface's rate"),
        ({"tcp_bytes_per_s": 9e9}, "ok", "84% of the interface's rate"),
    ],
)
def test_goodput_is_held_against_the_least_of_what_the_link_can_do(
    change: dict[str, float], verdict: str, reason: str
) -> None:
    flow = replace(FLOW, **change)  # type: ignore[arg-type]
    check = verdicts.judge_goodput("out", flow, 10_000)
    assert (check.verdict, reason in check.says) == (verdict, True), check.says


def test_without_anything_to_compare_goodput_with_it_says_so() -> None:
    check = verdicts.judge_goodput("out", replace(FLOW, tcp_bytes_per_s=None), None)
    assert check.verdict == "ok"
    assert check.says.endswith("what the link can do is not known")


@pytest.mark.parametrize(
    ("change", "name", "help_"),
    [
        ({"path_bytes": 1_200}, "path MTU", "ping -M do -s 1400 10.1.1.9"),
        ({"has_gso": False}, "GSO on the link", "sudo ethtool -K eth1 tx on"),
        ({"round_trips_s": (1e-4,) * 80 + (0.2,) * 20}, "round trip", "other load"),
        ({"out": replace(FLOW, resent_datagrams=75_000)}, "loss to the peer", "ethtool -S eth1"),
        (
            {"back": replace(FLOW, resent_datagrams=75_000, kernel_drops=9)},
            "loss from the peer",
            "rmem_max",
        ),
    ],
)
def test_a_poor_link_is_slow_and_says_what_to_look_at(
    change: dict[str, object], name: str, help_: str
) -> None:
    checks = judged_link(replace(LINK, **change))  # type: ignore[arg-type]
    assert checks[name].verdict == "slow"
    assert help_ in "\n".join(checks[name].helps)
    assert {check.verdict for other, check in checks.items() if other != name} == {"ok"}


def test_clocks_may_be_as_far_apart_as_handshakes_allow() -> None:
    assert verdicts.judge_wall_clock(-100.0).verdict == "ok"
    far = verdicts.judge_wall_clock(200.0)
    assert far.verdict == "slow"
    assert far.says.startswith("200 s ahead of the peer's")


# --- looking at this machine ------------------------------------------------------------------------------------------


def test_the_kernel_s_counters_of_both_families_are_added() -> None:
    text = """\
Udp: InDatagrams NoPorts InErrors OutDatagrams RcvbufErrors SndbufErrors
Udp: 1000 2 3 4 5 6
UdpLite: InDatagrams NoPorts InErrors OutDatagrams RcvbufErrors SndbufErrors
UdpLite: 7 7 7 7 7 7
Udp6InDatagrams                 	200
Udp6RcvbufErrors                	10
"""
    assert gather.parse_drops(text) == Drops(received=1200, dropped=15)


def test_a_secret_is_described_without_being_shown() -> None:
    found = gather.look_at_secret(SECRET_TEXT)
    assert found.is_set
    assert found.problem == ""
    assert found == gather.look_at_secret(SECRET.hex())
    assert len(found.fingerprint) == 8
    assert found.fingerprint != gather.look_at_secret(generate_secret()).fingerprint
    assert found.fingerprint not in SECRET.hex()
    assert (
        "31 bytes" in gather.look_at_secret("AA" * 31).problem or gather.look_at_secret("x").problem
    )
    assert gather.look_at_secret(None) == Secret(is_set=False)


def test_what_a_socket_gets_is_measured_on_loopback() -> None:
    found = gather.look_at_socket()
    assert found.receive_bytes > 0
    if sys.platform == "linux":
        assert found.has_gso
        assert found.has_gro
        assert found.datagrams_per_receive > 4
        assert gather.interface_of("127.0.0.1") == "lo"


def test_a_port_in_use_and_an_impossible_mask_are_found_out() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        found = gather.look_at_binding(f"127.0.0.1:{taken.getsockname()[1]}", None, None)
        assert found.error_number == errno.EADDRINUSE
        assert verdicts.judge_port(found, "Linux").verdict == "FAIL"
    found = gather.look_at_binding("0.0.0.0:0", "203.0.113.0/24", None)
    assert "203.0.113.0/24" in found.problem
    assert verdicts.judge_interface(found).verdict == "FAIL"


# --- who is at an address ---------------------------------------------------------------------------------------------


def test_a_knock_finds_a_node_with_the_same_secret_and_does_not_join_it() -> None:
    with Node("127.0.0.1:0", secret=SECRET) as node:
        assert knock(parse_address(node.address), SECRET, 10.0) == "node"
        assert node.receive(timeout_s=0.3) == []
        assert node.peers == ()
        assert node.events() == []


def test_a_knock_tells_a_doctor_from_a_node() -> None:
    with Node("127.0.0.1:0", secret=doctors_secret(SECRET)) as node:
        assert knock(parse_address(node.address), SECRET, 10.0) == "doctor"


def test_another_secret_is_silence_and_an_empty_port_a_refusal() -> None:
    with Node("127.0.0.1:0", secret=generate_secret()) as node:
        address = parse_address(node.address)
        assert knock(address, SECRET, 0.4) == "silent"
    assert knock(address, SECRET, 0.4) == ("refused" if sys.platform == "linux" else "silent")


# --- the link ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[Node, Node]]:
    secret = doctors_secret(SECRET)
    with (
        Node("127.0.0.1:0", secret=secret) as one,
        Node("127.0.0.1:0", [one.address], secret=secret) as two,
    ):
        one.wait_for_peers(1, 10.0)
        two.wait_for_peers(1, 10.0)
        yield one, two


@pytest.mark.parametrize(
    ("question", "complaint"),
    [
        (b"no JSON", "does not know"),
        (b"[]", "does not know"),
        (b'{"do": "dance"}', "does not know"),
        (b"[" * 100_000, "too long"),
        (b'{"do": "send", "seconds": 1e9}', "at most 60"),
        (b'{"do": "send", "seconds": NaN}', "at most 60"),
    ],
)
def test_an_answerer_refuses_what_it_does_not_know_or_is_asked_for_too_long(
    pair: tuple[Node, Node], question: bytes, complaint: str
) -> None:
    one, two = pair
    answerer = link.Answerer(one, "127.0.0.1", lambda _: None)
    two.publish(question, link.ASK)
    answers = []
    end_s = time.monotonic() + 10.0
    while not answers and time.monotonic() < end_s:
        answerer.turn(timeout_s=0.05)
        answers = two.receive(timeout_s=0.05)
    assert complaint in json.loads(bytes(answers[0].payload))["error"]


def test_an_asker_gives_up_on_somebody_who_does_not_answer(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    monkeypatch.setattr(link, "ANSWER_S", 0.1)
    asker = link.Asker(two, one.peer, seconds=0.1)
    with pytest.raises(link.LinkError, match="has not answered"):
        asker.greet()


def test_an_asker_notices_that_the_other_has_left(pair: tuple[Node, Node]) -> None:
    one, two = pair
    asker = link.Asker(two, two.peers[0], seconds=0.1)
    one.close(timeout_s=0.1)
    while two.peers:
        two.receive(timeout_s=0.05)
    with pytest.raises((link.LinkError, NotConnected)):
        asker.greet()


@pytest.mark.parametrize("sends", [True, False])
def test_tcp_is_measured_in_both_directions_and_only_with_the_token(sends: bool) -> None:
    port, token = tcp.serve_once("127.0.0.1", 0.1, sends=not sends)
    rate = tcp.rate(("127.0.0.1", port), token, 0.1, sends=sends)
    assert rate is not None
    assert rate > 0
    port, token = tcp.serve_once("127.0.0.1", 0.1, sends=not sends)
    assert tcp.rate(("127.0.0.1", port), bytes(16), 0.1, sends=sends) is None
    assert tcp.rate(("127.0.0.1", port), token, 0.1, sends=sends) is None  # one caller only


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A doctor that serves in a process of its own, and its address."""
    monkeypatch.setenv("GRADWIRE_SECRET", SECRET_TEXT)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "gradwire.cli", "doctor", "--serve", "--bind", address]
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
    assert main(["doctor", address, "--seconds", "0.2", "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text)
    assert found["ok"]
    assert SECRET_TEXT not in text
    assert SECRET.hex() not in text
    verdict_of = {check["name"]: check["verdict"] for check in found["checks"]}
    assert verdict_of["peer"] == verdict_of["path MTU"] == verdict_of["wall clocks"] == "ok"
    assert "FAIL" not in verdict_of.values()
    for direction in ("out", "back"):
        flow = found["link"][direction]
        assert flow["received_bytes"] == flow["sent_bytes"] >= MEGABYTE
        assert flow["sent_bytes"] / flow["seconds"] == pytest.approx(flow["bytes_per_s"])
        assert flow["tcp_bytes_per_s"] > 0
        assert flow["datagrams"] > flow["sent_bytes"] / 65_535
    assert found["link"]["round_trips"] >= link.PINGS_MIN
    assert 0 < found["link"]["round_trip_s"]["p50"] <= found["link"]["round_trip_s"]["p99"]
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=30.0)
    assert process.returncode == 0
    assert rest.splitlines()[-1] == "done"


def test_a_link_is_printed_as_lines_and_a_table(
    server: tuple[str, subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    address, _ = server
    assert main(["doctor", address, "--seconds", "0.1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith("goodput, 1 MB messages") and line.endswith("MB/s") for line in lines
    )
    assert any(line.startswith("ok    peer:") for line in lines)
    assert SECRET_TEXT not in "\n".join(lines)


# --- the command ------------------------------------------------------------------------------------------------------


def test_without_a_peer_the_doctor_looks_at_this_machine_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_SECRET", SECRET_TEXT)
    assert main(["doctor", "--bind", "127.0.0.1:0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("instruction set", "encryption", "secret", "socket buffers", "GSO, GRO", "clock"):
        assert any(name + ":" in line for line in lines)
    assert lines[-1] == "all is well" or lines[-1].startswith("works; costs speed: ")


def test_a_peer_that_nobody_serves_ends_with_status_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_SECRET", SECRET_TEXT)
    monkeypatch.setattr("gradwire.cli.doctor.visit.KNOCK_S", 0.3)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        assert main(["doctor", f"127.0.0.1:{silent.getsockname()[1]}"]) == 1
    out = capsys.readouterr().out
    assert "does not answer" in out
    assert fingerprint(SECRET) in out
    assert out.splitlines()[-1] == "does not work: peer"


def test_a_peer_without_a_secret_ends_with_status_1_and_the_command_that_makes_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRADWIRE_SECRET", raising=False)
    assert main(["doctor", "127.0.0.1:1", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    [secret] = [check for check in found["checks"] if check["name"] == "secret"]
    assert secret["verdict"] == "FAIL"
    assert "gradwire secret" in secret["helps"][0]
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
def test_a_test_takes_up_to_a_minute(seconds: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--seconds", seconds])
