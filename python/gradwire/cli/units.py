"""Quantities as people read them."""

from __future__ import annotations

__all__ = ["si"]


def si(value: float, unit: str) -> str:
    """Return three digits of a quantity, with a decimal prefix before the unit.

    >>> si(512, "B"), si(2_048_000, "B"), si(1e9, "bit/s")
    ('512 B', '2.05 MB', '1 Gbit/s')
    """
    for prefix in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1e3
    return f"{value:.3g} T{unit}"
