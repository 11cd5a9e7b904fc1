"""Put the tables of a JSON report into a page, so that no figure is typed by hand.

    python benchmarks/bench_codec.py --json report.json
    python benchmarks/publish.py report.json docs/performance.md

The block ``<!-- begin GROUP -->`` to ``<!-- end GROUP -->`` receives the table of that group of rows, and the block
``BENCHMARK-machine`` a line about the machine. Groups without a block are left out.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from harness import Row, table


def blocks(content: dict[str, Any]) -> dict[str, str]:
    """Return the text of every block that a report can fill."""
    rows = [Row.from_dict(row) for row in content["rows"]]
    groups = dict.fromkeys(row.group for row in rows)
    texts = {group: table([row for row in rows if row.group == group]) for group in groups}
    facts = {**content["machine"], **content["parameters"]}
    del facts["command"]
    about = [f"{name} {value}" for name, value in facts.items()]
    about += [f"skipped {name} ({reason})" for name, reason in content["skipped"].items()]
    return {f"{content['benchmark']}-machine": "; ".join(about) + ".", **texts}


def main(report: Path, page: Path) -> None:
    """Replace the blocks of a page."""
    content = json.loads(report.read_text())
    if content["void"]:
        raise SystemExit(f"{report}: no figure of this run counts: {content['void']}")
    text, filled = page.read_text(), 0
    for name, block in blocks(content).items():
        marked = rf"(<!-- begin {re.escape(name)} -->\n).*?(<!-- end {re.escape(name)} -->)"
        filled_in = lambda match, block=block: f"{match[1]}{block}\n{match[2]}"  # noqa: E731
        text, count = re.subn(marked, filled_in, text, flags=re.DOTALL)
        filled += count
    if not filled:
        raise SystemExit(f"{page}: has no block for {', '.join(blocks(content))}")
    page.write_text(text)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
