#!/usr/bin/env bash
# Ten minutes on a GPU machine that has torch, transformers, accelerate and peft, and no network.
#
#   deploy/gpu-check.sh wheels        where there is a network: collect the other packages in .gpu-check/wheels (under 20 MiB)
#   deploy/gpu-check.sh run [OUT]     on the GPU machine, in a copy of this folder: tests/gpu, then the benchmark; results in OUT
#
# PYTHON names the interpreter (python3). TARGET_PYTHON is the version on the GPU machine for `wheels`, such as 3.12.
# TEST_SECONDS (200) and BENCH_SECONDS (330) limit the two parts.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
here=.gpu-check

# Everything that the engine, its tests and TRL's side of the benchmark import, besides what the machine has.
packages=(
    annotated-types beartype datasets dill httpx hypothesis iniconfig jaxtyping jsonschema jsonschema-specifications
    markdown-it-py mdurl multiprocess orjson pluggy psutil pydantic pydantic-core
    pygments pytest referencing rich rpds-py setproctitle sortedcontainers tenacity trl typing-inspection
    wadler-lindig xxhash
)

collect() {
    mkdir -p "$here/wheels"
    local version
    version=${TARGET_PYTHON:-$("$python" -c 'import sys; print(f"{sys.version_info.major}.{sys.version_info.minor}")')}
    "$python" -m pip download --quiet --no-deps --only-binary :all: --python-version "$version" \
        --constraint deploy/constraints.txt --dest "$here/wheels" "${packages[@]}"
    du -sh "$here/wheels"
}

run() {
    local out=${1:-$here/out}
    mkdir -p "$out"
    if compgen -G "$here/wheels/*.whl" >/dev/null; then
        "$python" -m venv --system-site-packages "$here/venv"
        "$here/venv/bin/python" -m pip install --quiet --no-index --no-deps "$here"/wheels/*.whl
        python="$here/venv/bin/python"
    fi
    export HF_HUB_OFFLINE=1 PYTHONSAFEPATH= PYTHONPATH=$PWD
    { nvidia-smi || true; "$python" -m pip list 2>/dev/null || true; } >"$out/machine.txt" 2>&1
    # Not the project's pytest settings: they name plugins that are not here, and make every warning of a library an error.
    timeout "${TEST_SECONDS:-200}" "$python" -m pytest -c /dev/null --rootdir=. -q -rA -p no:cacheprovider tests/gpu \
        >"$out/tests.txt" 2>&1 || true
    tail -n 1 "$out/tests.txt"
    "$python" -m tests.benchmarks.gpu --budget "${BENCH_SECONDS:-330}" --out "$out/bench.jsonl" ${BENCH_ARGS:-} || true
    echo "results: $out"
}

case ${1:-} in
wheels) collect ;;
run) run "${2:-}" ;;
*) sed -n '2,8s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
