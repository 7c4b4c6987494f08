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
# TEST_SECONDS (200) and BENCH_SECONDS (330) limit the two parts, TEST_ARGS and BENCH_ARGS add arguments. What hangs is interrupted, and
# killed KILL_SECONDS (20) later; the results up to then stay. `run` ends with the status of the tests.
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

# limited SECONDS COMMAND...: SIGINT lets pytest sum up, also where this script runs in the background, whose children would ignore it.
# What does not hear it is killed.
limited() { timeout -s INT -k "${KILL_SECONDS:-20}" "$1" env --default-signal=INT "${@:2}"; }

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
    { limited 30 nvidia-smi || true; limited 60 "$python" -m pip list || true; } >"$out/machine.txt" 2>&1
    # Each result is written as it ends. What may break or hang its process comes last, each in a process of its own, and each part
    # leaves a quarter of the time to those that follow.
    local part left code ends=$((SECONDS + ${TEST_SECONDS:-200})) bench=${BENCH_SECONDS:-330}
    export PYTHONUNBUFFERED=1
    rm -f "$out/tests.txt"
    for part in passes stages risky compile; do
        left=$((ends - SECONDS)) code=0
        [[ $part == compile ]] || left=$((left * 3 / 4))
        if ((left < 1)); then
            echo "tests/gpu/test_$part.py: the time has ended" >>"$out/tests.txt" && status=124 && continue
        fi
        # torch's compiler cannot read the checks of shapes in every version.
        [[ $part != compile ]] || export JAXTYPING_DISABLE=1
        # Not the project's pytest settings: they name plugins that are not here, and make every warning of a library an error.
        # Of a test that hangs, faulthandler writes where.
        limited "$left" "$python" -m pytest -c /dev/null --rootdir=. -v -rA -p no:cacheprovider -o faulthandler_timeout=45 \
            "tests/gpu/test_$part.py" ${TEST_ARGS:-} >>"$out/tests.txt" 2>&1 || code=$?
        # 5: TEST_ARGS leave out all of the file.
        ((code == 0 || code == 5)) || status=$code
        tail -n 1 "$out/tests.txt"
    done
    unset JAXTYPING_DISABLE
    limited $((bench + 60)) "$python" -m tests.benchmarks.gpu --budget "$bench" --out "$out/bench.jsonl" ${BENCH_ARGS:-} || true
    echo "results: $out"
    return "$status"
}

case ${1:-} in
wheels) collect "${@:2}" ;;
run) run ;;
*) sed -n '2,12s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
