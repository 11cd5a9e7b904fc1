"""What the compiler says of the CUDA kernels: no warnings, no register spills, and 128-bit loads in the hot kernel.

    python .ci/check_kernels.py <build folder> [cuobjdump]

Reads what nvcc wrote beside each object (cmake/run_nvcc.cmake) and, where cuobjdump is given, the machine code.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

# pass 1 of a float32 update into a float32 residual, mangled; and what it must load and store at a time
HOT_KERNEL = re.compile(r"extract_kernelIffEE?")
LOADS_LEAST = 8
STORES_LEAST = 4


def check_report(report: Path) -> Counter[str]:
    """Return the number of kernels for each architecture; a warning or a spill ends the program."""
    text = report.read_text()
    if re.search(r"\bwarning\b|\berror\b", text):
        sys.exit(f"{report.name} has warnings:\n{text}")
    kernels: Counter[str] = Counter()
    name = ""
    for line in text.splitlines():
        if found := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
            name = f"{found[1]} for {found[2]}"
            kernels[found[2]] += 1
        elif re.search(r"[1-9]\d* bytes spill", line):
            sys.exit(f"registers are spilled in {name}: {line.strip()}")
    return kernels


def check_machine_code(cuobjdump: str, binary: Path) -> None:
    """Check the hot kernel's loads and stores on every architecture."""
    done = subprocess.run(
        [cuobjdump, "-sass", str(binary)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"cuobjdump: {done.stderr or done.stdout}")
    found = 0
    for part in re.split(r"\n\s*Function : ", done.stdout)[1:]:
        if not HOT_KERNEL.search(part.split("\n", 1)[0]):
            continue
        found += 1
        loads = len(re.findall(r"\bLDG\.E\.128\b", part))
        stores = len(re.findall(r"\bSTG\.E\.128\b", part))
        print(f"hot kernel: {loads} loads and {stores} stores of 128 bits")
        if loads < LOADS_LEAST or stores < STORES_LEAST:
            sys.exit("the hot kernel's loads or stores are not 128 bits wide")
        if re.search(r"\b(LDL|STL)\b", part):
            sys.exit("the hot kernel keeps something in local memory")
    if found == 0:
        sys.exit("the hot kernel is not among the machine code")


def main() -> None:
    """Check all kernels."""
    folder = Path(sys.argv[1]) / "cuda"
    for name in ("encode", "apply"):
        for architecture, kernels in sorted(check_report(folder / f"{name}.o.txt").items()):
            print(f"{name}: {kernels} kernels for {architecture}, none spills")
    if len(sys.argv) > 2:
        check_machine_code(sys.argv[2], folder / "encode.o")
    else:
        print("machine code not checked: no cuobjdump")


if __name__ == "__main__":
    main()
