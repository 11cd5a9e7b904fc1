"""The rows of a result, and Markdown tables made of them: what all parts of docs/performance.md share."""

from __future__ import annotations

from typing import Any

__all__ = ["Result", "cell", "least", "number", "reach", "table", "verdict"]


class Result:
    """The rows of one result, found by what they measured."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.machine: dict[str, Any] = result["machine"]
        self.parameters: dict[str, Any] = result["parameters"]
        self.skipped: dict[str, str] = result["skipped"]
        self.load: float = result["load_average_before"][0]
        self.others: float | None = result["cpus_used_by_others"]
        self.rows: list[dict[str, Any]] = result["rows"]
        self._by_key = {(row["what"], row["reference"], row["numel"]): row for row in self.rows}

    def row(self, what: str, reference: str, numel: int) -> dict[str, Any] | None:
        """Return the row, or None if it was not measured."""
        return self._by_key.get((what, reference, numel))

    def group(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of one group."""
        return [row for row in self.rows if row["group"] == name]


def number(value: float) -> str:
    """Return three digits or so."""
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def cell(row: dict[str, Any] | None) -> str:
    """Return the figure of the minima and, in brackets, of the medians."""
    return f"{number(row['minimum'])} ({number(row['median'])})" if row else ""


def reach(row: dict[str, Any]) -> str:
    """Return the figure to reach."""
    goal = row["reach"]
    return f"{'≤' if goal['relation'] == '<=' else '≥'} {goal['value']:g}" if goal else ""


def least(row: dict[str, Any]) -> str:
    """Return the least possible figure."""
    return "" if row["floor"] is None else number(row["floor"])


def verdict(rows: list[dict[str, Any]]) -> str:
    """Return whether the reach is met, once where the rows agree."""
    return " / ".join(dict.fromkeys(row["verdict"].lower() for row in rows if row["verdict"]))


def table(lines: list[list[str]]) -> str:
    """Return lines of cells as Markdown; the first is the head."""
    head, *body = lines
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *body))
