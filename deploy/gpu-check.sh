#!/usr/bin/env bash
# Ten minutes on a GPU machine that has torch, transformers, accelerate and peft, and no network.
#
#   deploy/gpu-check.sh wheels [NAME...]  where there is a network: collect the other packages in .gpu-check/wheels (under 20 MiB)
#   deploy/gpu-check.sh run [OUT]         on the GPU machine, in a copy of this folder: tests/gpu, then the benchmark; results in OUT
#
# The machine also needs pyarrow (48 MiB), with which stages read and write tables, and pandas for TRL's side of the benchmark.
# Without pyarrow tests/gpu/test_passes.py runs alone. `wheels pyarrow pandas` brings them along, with what pandas imports.
#
# PYTHON names the interpreter (python3). TARGET_PYTHON is the version on the GPU machine for `wheels`, such as 3.12.
# TEST_SECONDS (200) and BENCH_SECONDS (330) limit the two parts, TEST_ARGS and BENCH_ARGS add arguments. `run` ends with the status
# of the tests.
set -euo pipefail
absolute() { [[ -z $1 || $1 == /* ]] && echo "$1" || echo "$PWD/$1"; }
out=$(absolute "${2:-}")
python=$(absolute "$(command -v "${PYTHON:-python3}")")
cd "$(dirname "$0")/.."
here=.gpu-check

# Everything that the engine, its tests and TRL's side of the benchmark import, besides what the machine has.
packages=(
    annotated-types anyio attrs beartype certifi datasets dill h11 httpcore httpx hypothesis idna iniconfig jaxtyping jsonschema
    jsonschema-specifications markdown-it-py mdurl multiprocess orjson pluggy psutil pydantic pydantic-core
    pygments pytest referencing rich rpds-py setproctitle sortedcontainers tenacity trl typing-inspection
    wadler-lindig xxhash
)

collect() {
    mkdir -p "$here/wheels"
    local version
    version=${TARGET_PYTHON:-$("$python" -c 'import sys; print(f"{sys.version_info.major}.{sys.version_info.minor}")')}
    [[ " $* " == *" pandas "* ]] && packages+=(python-dateutil six)
    "$python" -m pip download --quiet --no-deps --only-binary :all: --python-version "$version" \
        --constraint deploy/constraints.txt --dest "$here/wheels" "${packages[@]}" "$@"
    du -sh "$here/wheels"
}

run() {
    local status=0
    out=${out:-$PWD/$here/out}
    mkdir -p "$out"
    # None of them tries a network that is not there.
    export HF_HUB_OFFLINE=1 PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1 DO_NOT_TRACK=1
    if compgen -G "$here/wheels/*.whl" >/dev/null; then
        # Not a venv: from the interpreter of a venv it would see the system's packages instead of that venv's torch.
        rm -rf "$here/site"
        "$python" -m pip install --quiet --no-deps --target "$here/site" "$here"/wheels/*.whl
    fi
    export PYTHONSAFEPATH= PYTHONPATH=$PWD/$here/site:$PWD
    { nvidia-smi || true; "$python" -m pip list || true; } >"$out/machine.txt" 2>&1
    # Each result is written as it ends, and what may break its process comes last and in one of its own. SIGINT lets pytest sum up.
    local file left ends=$((SECONDS + ${TEST_SECONDS:-200}))
    export PYTHONUNBUFFERED=1
    rm -f "$out/tests.txt"
    for file in passes stages risky; do
        left=$((ends - SECONDS))
        if ((left < 1)); then
            echo "tests/gpu/test_$file.py: the time has ended" >>"$out/tests.txt" && status=124 && continue
        fi
        # torch's compiler cannot read the checks of shapes in every version.
        [[ $file != risky ]] || export JAXTYPING_DISABLE=1
        # Not the project's pytest settings: they name plugins that are not here, and make every warning of a library an error.
        timeout -s INT -k 20 "$left" "$python" -m pytest -c /dev/null --rootdir=. -v -rA -p no:cacheprovider \
            "tests/gpu/test_$file.py" ${TEST_ARGS:-} >>"$out/tests.txt" 2>&1 || status=$?
        tail -n 1 "$out/tests.txt"
    done
    unset JAXTYPING_DISABLE
    "$python" -m tests.benchmarks.gpu --budget "${BENCH_SECONDS:-330}" --out "$out/bench.jsonl" ${BENCH_ARGS:-} || true
    echo "results: $out"
    return "$status"
}

case ${1:-} in
wheels) collect "${@:2}" ;;
run) run ;;
*) sed -n '2,13s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
