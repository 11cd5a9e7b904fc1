"""Whatever comes in, the node goes on: the fuzzer's targets under hypothesis (see `fuzz_endpoint.py`)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from . import hostile


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_parse_to_what_encodes_again_or_are_refused(data: bytes) -> None:
    hostile.parse(data)


@settings(deadline=None, max_examples=150)
@given(st.binary(min_size=20, max_size=600))
def test_no_script_of_a_hostile_member_stops_the_service(data: bytes) -> None:
    hostile.storm(data)
