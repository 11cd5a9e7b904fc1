"""The computed tables and the picture of docs/scale.md are those of the cost model.

After a change of the model, ``python tests/test_scale_doc.py`` writes them anew.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gradwire import cost
from gradwire.cost import Cost, Job

DOCS = Path(__file__).parents[1] / "docs"
PAGE, PICTURE = DOCS / "scale.md", DOCS / "scale.svg"
NODES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
JOB = Job(elements=25_000_000, nodes=2, step_s=0.2, link_bytes_per_s=125e6, latency_s=1e-4)


def costs(nodes: int) -> dict[str, Cost]:
    """Return the cost of a step by the name of the line; everybody owns a part, or 64 nodes do."""
    job = replace(JOB, nodes=nodes, owners=nodes)
    found = {"dense ring": cost.dense_ring(job), "mesh": cost.exchange(job)}
    found["sharded, all own"] = cost.exchange(job, "sharded")
    found["sharded, 64 own"] = cost.exchange(replace(job, owners=min(64, nodes)), "sharded")
    found["sharded, 20 local steps"] = cost.exchange(job, "sharded", every=20)
    return found


def megabytes(nodes: int) -> dict[str, float]:
    """Return the MB that a node receives per step, by the name of the line; of the owner that receives most."""
    found = {name: one.received_bytes / 1e6 for name, one in costs(nodes).items()}
    found["1-bit (DeepSpeed)"] = cost.one_bit_bytes(JOB.elements, nodes) / 1e6
    least, most = cost.ok_topk_bytes(JOB.elements, JOB.density, nodes)
    return found | {"Ok-Topk, at least": least / 1e6, "Ok-Topk, at most": most / 1e6}


def table(head: str, lines: dict[str, list[str]]) -> str:
    heads = [head, *map(str, NODES)]
    rows = [heads, ["---"] * len(heads), *([name, *cells] for name, cells in lines.items())]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def blocks() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every computed block of the page."""
    sizes = [megabytes(nodes) for nodes in NODES]
    lines = {name: [f"{one[name]:.3g}" for one in sizes] for name in sizes[0]}
    yield "scale-bytes", table("MB received per node and step, by number of nodes", lines)
    steps = [costs(nodes) for nodes in NODES]
    lines = {name: [f"{one[name].step_s * 1e3:.0f}" for one in steps] for name in steps[0]}
    yield "scale-steps", table("ms per step, by number of nodes", lines)


def picture() -> str:
    """Return the two tables as an SVG picture: lines over the number of nodes, both axes logarithmic."""
    width, height, left, top = 360.0, 250.0, 60.0, 30.0
    colours = [
        "#222222",
        "#1f77b4",
        "#d62728",
        "#ff7f0e",
        "#2ca02c",
        "#9467bd",
        "#8c564b",
        "#7f7f7f",
    ]
    sizes, steps = [megabytes(one) for one in NODES], [costs(one) for one in NODES]
    panels = [
        (
            "MB received per node and step",
            {name: [one[name] for one in sizes] for name in sizes[0]},
            (-2, 3),
        ),
        (
            "seconds per step",
            {name: [one[name].step_s for one in steps] for name in steps[0]},
            (-1, 1),
        ),
    ]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1040 320" font-family="sans-serif" font-size="12">'
    ]
    parts.append('<rect width="1040" height="320" fill="white"/>')
    for index, (title, lines, (low, high)) in enumerate(panels):
        x0 = left + index * (width + 70)

        def place(
            number: int, value: float, x0: float = x0, low: int = low, high: int = high
        ) -> str:
            share = (math.log10(value) - low) / (high - low)
            return (
                f"{x0 + number * width / (len(NODES) - 1):.1f},{top + height * (1.0 - share):.1f}"
            )

        parts.append(f'<text x="{x0}" y="{top - 12}" font-weight="bold">{title}</text>')
        for power in range(low, high + 1):
            y = top + height * (1.0 - (power - low) / (high - low))
            parts.append(f'<path d="M{x0},{y:.1f} h{width}" stroke="#dddddd"/>')
            parts.append(
                f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
            )
        for number, nodes in enumerate(NODES):
            x = x0 + number * width / (len(NODES) - 1)
            parts.append(
                f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">{nodes}</text>'
            )
        for colour, values in zip(colours, lines.values(), strict=False):
            points = " ".join(place(number, value) for number, value in enumerate(values))
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
    for number, (colour, name) in enumerate(zip(colours, sizes[0], strict=True)):
        y = top + 10 + 20 * number
        parts.append(f'<path d="M870,{y} h20" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="896" y="{y + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def filled(page: str) -> str:
    """Return the page with its computed blocks."""
    for name, block in blocks():
        marked = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
        page, count = re.subn(
            marked, lambda found, block=block: f"{found[1]}{block}\n{found[2]}", page, flags=re.S
        )
        assert count == 1, f"one block {name} in {PAGE}"
    return page


def test_the_tables_are_the_cost_model_s() -> None:
    page = PAGE.read_text()
    assert filled(page) == page, "python tests/test_scale_doc.py writes the tables anew"


def test_the_picture_is_the_cost_model_s() -> None:
    assert PICTURE.read_text() == picture(), "python tests/test_scale_doc.py draws it anew"


def test_every_function_of_the_model_is_explained() -> None:
    page = PAGE.read_text()
    assert [name for name in cost.__all__ if f"`{name}`" not in page] == []


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
    PICTURE.write_text(picture())
