"""Coverage-guided fuzzing of the transport with atheris; the targets are in `hostile.py`.

Run from the directory ``tests``. A failing input is written to a file; given as an argument, the file repeats it::

    python -m transport.fuzz_endpoint -max_total_time=60 corpus/
    python -m transport.fuzz_endpoint crash-0123456789
"""

from __future__ import annotations

import logging
import random
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["gradwire.transport"]):
    from . import hostile

SEEDS = 40


def one_input(data: bytes) -> None:
    """Run the bytes as frames and as a script."""
    hostile.parse(data)
    hostile.storm(data)


def write_seeds(corpus: Path) -> None:
    """Write random scripts to start from, which reach every operation at once."""
    corpus.mkdir(parents=True, exist_ok=True)
    if any(corpus.iterdir()):
        return
    generator = random.Random(1)
    for number in range(SEEDS):
        (corpus / f"seed-{number}").write_bytes(generator.randbytes(generator.randrange(20, 400)))


def main() -> None:
    """Start libFuzzer; its options begin with a dash."""
    for argument in sys.argv[1:]:
        if not argument.startswith("-") and not Path(argument).is_file():
            write_seeds(Path(argument))
    logging.disable()  # a hostile peer causes many warnings
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
