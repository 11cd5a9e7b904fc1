"""Every public name has an entry in the built site: usage: check_reference.py SITE (a folder with objects.inv)."""

from __future__ import annotations

import ast
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "python" / "gradwire"
MODULES = (
    *(
        "",
        "coprocessor",
        "cost",
        "dl4j",
        "errors",
        "exchange",
        "feed",
        "jax",
        "policy",
        "ray",
        "spark",
        "torch",
    ),
    "transport",
)
# A module, and types that the site shows where they are used.
ELSEWHERE = {
    "gradwire.__version__",
    "gradwire.torch.ops",
    "gradwire.exchange.AnyExchange",
    "gradwire.transport.Event",
    "gradwire.policy.FIRST_TREND",
}


def public_names() -> Iterator[str]:
    """Yield the names in ``__all__`` of the public modules."""
    for module in MODULES:
        path = PACKAGE / module / "__init__.py"
        if not path.exists():
            path = PACKAGE / f"{module}.py"
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                for name in ast.literal_eval(node.value):
                    yield ".".join(filter(None, ("gradwire", module, name)))


def entries(site: Path) -> set[str]:
    """Return the names in the index of a site, which Sphinx defines: four lines, then the rest compressed."""
    lines = site.joinpath("objects.inv").read_bytes().split(b"\n", 4)
    return {line.split()[0] for line in zlib.decompress(lines[4]).decode().splitlines()}


def main() -> int:
    """Print the names without an entry; return 1 if there are any."""
    shown = entries(Path(sys.argv[1])) | ELSEWHERE
    # A function that has its module's name: griffe takes the package's name for the module.
    shown |= {
        name.rpartition(".")[0] for name in shown if name.split(".")[-2:-1] == name.split(".")[-1:]
    }
    missing = set(public_names()) - shown
    print(*(f"{name} is not in the reference" for name in sorted(missing)), sep="\n")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
