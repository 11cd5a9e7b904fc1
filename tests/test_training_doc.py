"""README's rows and the picture of training over slow links are those of the tables in docs/performance.md.

After new measurements, ``python tests/test_training_doc.py`` writes them anew.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
README, MEASURED, PICTURE = (
    ROOT / "README.md",
    ROOT / "docs" / "performance.md",
    ROOT / "docs" / "training.svg",
)
RATES = ("10", "100", "1000")
# Lines of the picture: name, colour, and the methods of the table of which the fastest counts.
LINES = {
    "DDP": ("#222222", ("dense",)),
    "DDP, fp16": ("#7f7f7f", ("fp16",)),
    "DDP, PowerSGD": ("#1f77b4", ("powersgd-2", "powersgd-4")),
    "local SGD": ("#ff7f0e", ("local-sgd",)),
    "gradwire": ("#d62728", ("gradwire-udp",)),
    "gradwire, every=4": ("#2ca02c", ("gradwire-every4",)),
}
TASKS = {
    "training-text": "transformer on text",
    "training-digits": "convolutional network on digits",
}
WIDTH, HEIGHT, LEFT, TOP, POWERS = 330.0, 160.0, 50.0, 52.0, (1, 4)


def seconds(task: str) -> dict[str, list[float | None]]:
    """Return the median seconds to the target by method, for each rate of the link; None: not reached."""
    [block] = re.findall(
        rf"<!-- begin {task} -->\n(.*?)<!-- end {task} -->", MEASURED.read_text(), re.S
    )
    head, _, *rows = [[one.strip() for one in row.split("|")[1:-1]] for row in block.splitlines()]
    columns = [head.index(f"s at {rate} Mbit/s") for rate in RATES]
    return {
        row[0]: [float(row[at].split()[0].replace(",", "")) if row[at] else None for at in columns]
        for row in rows
    }


def lines(task: str) -> Iterator[tuple[str, list[float | None]]]:
    """Yield the name and the seconds of every line of the picture."""
    table = seconds(task)
    for name, (_, methods) in LINES.items():
        columns = zip(*(table[method] for method in methods), strict=True)
        yield name, [min((one for one in column if one), default=None) for column in columns]


def block() -> str:
    """Return README's table: a row for each rate."""
    found = dict(lines("training-text"))
    rows = [["seconds", *LINES], ["---"] * (1 + len(LINES))]
    for index, rate in enumerate(RATES):
        times = [found[name][index] for name in LINES]
        rows.append(
            [
                f"{rate} Mbit/s",
                *(f"{time:,.0f}" if time > 99.5 else f"{time:.1f}" for time in times if time),
            ]
        )
    assert all(len(row) == len(rows[0]) for row in rows)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def picture() -> str:
    """Return both tasks as an SVG picture: seconds to the target, logarithmic, over the rate of the links."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 250" font-family="sans-serif" font-size="12">',
        '<rect width="960" height="250" fill="white"/>',
        '<text x="12" y="20" font-size="14" font-weight="bold">'
        "Seconds to the same validation loss, 4 nodes</text>",
    ]
    low, high = POWERS
    for number, (task, title) in enumerate(TASKS.items()):
        x0 = LEFT + number * (WIDTH + 60)
        parts.append(f'<text x="{x0}" y="{TOP - 10}">{title}</text>')
        for power in range(low, high + 1):
            y = TOP + HEIGHT * (high - power) / (high - low)
            parts.append(f'<path d="M{x0},{y:.1f} h{WIDTH}" stroke="#dddddd"/>')
            parts.append(
                f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{10**power:,}</text>'
            )
        places = [x0 + WIDTH * (0.08 + 0.42 * index) for index in range(len(RATES))]
        for x, rate in zip(places, RATES, strict=True):
            parts.append(
                f'<text x="{x:.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle">{rate} Mbit/s</text>'
            )
        for name, times in lines(task):
            points = [
                (x, TOP + HEIGHT * (high - math.log10(time)) / (high - low))
                for x, time in zip(places, times, strict=True)
                if time is not None
            ]
            colour, _ = LINES[name]
            drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(
                f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points
            ]
    x = LEFT + 2 * (WIDTH + 60)
    missing = {name for name, times in lines("training-digits") if None in times}
    for number, (name, (colour, _)) in enumerate(LINES.items()):
        y = TOP + 4 + 24 * number
        parts.append(f'<path d="M{x - 24},{y} h18" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x}" y="{y + 4}">{name}{" *" * (name in missing)}</text>')
    if missing:
        parts.append(f'<text x="{x - 24}" y="{TOP + HEIGHT + 4}">* not reached on digits</text>')
    return "\n".join([*parts, "</svg>", ""])


def filled(page: str) -> str:
    """Return README with its table."""
    marked = r"(<!-- begin training -->\n).*?(<!-- end training -->)"
    page, count = re.subn(
        marked, lambda found: f"{found[1]}{block()}\n{found[2]}", page, flags=re.S
    )
    assert count == 1
    return page


def test_the_rows_of_the_readme_are_measured() -> None:
    page = README.read_text()
    assert filled(page) == page, "python tests/test_training_doc.py writes the rows anew"


def test_the_picture_shows_what_was_measured() -> None:
    assert PICTURE.read_text() == picture(), "python tests/test_training_doc.py draws it anew"


if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
    PICTURE.write_text(picture())
