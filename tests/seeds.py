"""How many seeds the tests of random histories go through."""

from __future__ import annotations

import os


def seeds(default: int) -> range:
    """Return the first ``default`` seeds, or as many as the environment variable ``GRADWIRE_SEEDS`` says."""
    return range(int(os.environ.get("GRADWIRE_SEEDS", default)))
