"""The doctor's report: plain lines for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from .facts import Flow, Link, Machine
from .verdicts import Check

NAME_WIDTH = 24
COLUMN_WIDTH = 18


def is_well(checks: Sequence[Check]) -> bool:
    """Whether nothing fails; what only costs speed does not count."""
    return all(check.verdict != "FAIL" for check in checks)


def lines_of(check: Check) -> Iterator[str]:
    """Yield the verdict, and what helps."""
    yield f"{check.verdict:5} {check.name + ':':{NAME_WIDTH}} {check.says}"
    for help_ in check.helps:
        yield f"{'':5} {'':{NAME_WIDTH}} > {help_}"


def conclusion(checks: Sequence[Check]) -> str:
    """Return one line about all of it."""
    failed = [check.name for check in checks if check.verdict == "FAIL"]
    slow = [check.name for check in checks if check.verdict == "slow"]
    if failed:
        return f"does not work: {', '.join(failed)}"
    return f"works; costs speed: {', '.join(slow)}" if slow else "all is well"


def link_table(link: Link) -> Iterator[str]:
    """Yield what a test found."""
    yield ""
    yield f"{'link to ' + link.peer:{NAME_WIDTH + 6}} {'to the peer':>{COLUMN_WIDTH}} {'from the peer':>{COLUMN_WIDTH}}"
    both = (link.out, link.back)
    yield _row("goodput, 1 MB messages", [f"{flow.bytes_per_s / 1e6:,.1f} MB/s" for flow in both])
    yield _row("TCP, not encrypted", [_tcp(flow) for flow in both])
    yield _row("sent again", [f"{flow.resent_share:.3%}" for flow in both])
    yield _row("dropped by the kernel", [str(flow.kernel_drops) for flow in both])
    yield _row("sender's processor", [f"{flow.sender_cpu:.2f}" for flow in both])
    yield _row("receiver's processor", [f"{flow.receiver_cpu:.2f}" for flow in both])
    trips_us = [link.round_trip_s(share) * 1e6 for share in (0.5, 0.99)]
    yield _row(
        "1 KB there and back",
        [f"{trip:,.0f} µs p{p}" for trip, p in zip(trips_us, (50, 99), strict=True)],
    )
    yield _row(
        "datagrams, interface", [f"{link.path_bytes} bytes", f"MTU {link.route_mtu or 'unknown'}"]
    )
    yield ""


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:{NAME_WIDTH + 6}} " + " ".join(f"{cell:>{COLUMN_WIDTH}}" for cell in cells)


def _tcp(flow: Flow) -> str:
    return (
        "unreachable" if flow.tcp_bytes_per_s is None else f"{flow.tcp_bytes_per_s / 1e6:,.1f} MB/s"
    )


def as_json(machine: Machine, link: Link | None, checks: Sequence[Check]) -> str:
    """Return everything as JSON; the secret is in none of it."""
    content = {
        "ok": is_well(checks),
        "checks": [asdict(check) for check in checks],
        "machine": asdict(machine),
        "link": None if link is None else _link_content(link),
    }
    return json.dumps(content, indent=1)


def _link_content(link: Link) -> dict[str, object]:
    """Return a link with its figures in place of the single round trips."""
    content = asdict(link)
    del content["round_trips_s"]
    for name, flow in (("out", link.out), ("back", link.back)):
        content[name] |= {"bytes_per_s": flow.bytes_per_s, "resent_share": flow.resent_share}
    quantiles = {f"p{share:.0%}"[:-1]: link.round_trip_s(share) for share in (0.5, 0.99)}
    return content | {"round_trip_s": quantiles, "round_trips": len(link.round_trips_s)}
