#!/usr/bin/env bash
# Everything that needs a GPU, in under ten minutes and without a network: build, tests, compute-sanitizer, bench_cuda.py.
# Needs Python with NumPy, torch, pybind11, scikit-build-core and pytest, CMake, ninja and nvcc; Triton is a
# reference where it is installed. Every part runs even if one before it failed.
#
#   benchmarks/gpu_check.sh [folder for the results, default: gpu-check]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
results=${1:-gpu-check}
mkdir -p "$results"
results=$(cd "$results" && pwd)
python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1
unset GRADWIRE_ISA

declare -a summary=()
failures=0

# part NAME SECONDS FUNCTION...: runs it, with its output in a file; what it calls through `limited` ends after so long.
part() {
    local name=$1 limit=$2 began=$SECONDS status=0
    shift 2
    printf '\n=== %s\n' "$name"
    "$@" 2>&1 | tee "$results/${name// /-}.log" | tail -n 40
    status=${PIPESTATUS[0]}
    if [[ $status -eq 0 ]]; then
        summary+=("$(printf 'passed  %4d s  %s' $((SECONDS - began)) "$name")")
    else
        failures=$((failures + 1))
        summary+=("$(printf 'FAILED  %4d s  %s (exit status %d)' $((SECONDS - began)) "$name" "$status")")
    fi
    return "$status"
}

limited() { timeout -k 10 "$limit" "$@"; }

build() {
    limited "$python" -m pip install --no-deps --no-build-isolation --no-index --target "$scratch/site" . \
        -C cmake.define.GRADWIRE_CUDA=on -C cmake.define.GRADWIRE_WERROR=OFF -C "build-dir=$scratch/build"
}

# The repository's own settings ask for plugins that need not be here.
tests() {
    printf '[pytest]\naddopts = --import-mode=importlib -q -ra\nmarkers =\n    cuda: needs a GPU\n    torch: needs torch\n    slow: slow\n    netns: root\n' >"$scratch/pytest.ini"
    limited "$python" -m pytest -c "$scratch/pytest.ini" --rootdir . -p no:cacheprovider "$@"
}

sanitize() {
    local tool=$1
    limited compute-sanitizer --tool "$tool" --error-exitcode 1 "$python" benchmarks/sanitize_cuda.py
}

bench() { limited "$python" benchmarks/bench_cuda.py --json "$results/bench_cuda.json"; }

describe() {
    nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem,temperature.gpu --format=csv
    nvcc --version | tail -2
    git rev-parse HEAD 2>/dev/null || true
    "$python" -m gradwire info
}

part "build" 180 build || {
    printf '%s\n' "${summary[@]}"
    exit 1
}
export PYTHONPATH="$scratch/site${PYTHONPATH:+:$PYTHONPATH}"
part "machine" 60 describe
part "tests" 150 tests tests/test_cuda_encode.py tests/test_cuda_arrays.py
part "training" 90 tests tests/emulated_cuda/test_training.py tests/exchange/test_device.py tests/torch/test_ops.py
if command -v compute-sanitizer >/dev/null; then
    part "memcheck" 60 sanitize memcheck
    part "racecheck" 60 sanitize racecheck
else
    summary+=("skipped          compute-sanitizer is not installed")
fi
part "bench" 130 bench

printf '\n--- parts ---\n'
printf '%s\n' "${summary[@]}"
printf '%d failed, %d s, results in %s\n' "$failures" "$SECONDS" "$results"
[[ $failures -eq 0 ]]
