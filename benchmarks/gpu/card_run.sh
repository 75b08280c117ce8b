#!/usr/bin/env bash
# One run on one card in at most 590 s: what a card has to say of this commit, most wanted first.
#
#     bash benchmarks/gpu/kit.sh              before, where there is a network: .kit, which travels with the tree
#     OUT=folder bash benchmarks/gpu/card_run.sh [--tiny]
#
# Each part has a limit and a file of its own in OUT, and none begins when SECONDS_MOST are over. `--tiny` runs every part
# small, on a CPU too. At the end stand all steps, with their floors and the goals that they miss, and the parts that
# failed or did not begin; the exit status is 1 when one failed.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=${OUT:-build/card} SECONDS_MOST=${SECONDS_MOST:-585} KIT=.kit PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
tiny=() own=triton threads=4 minutes=(1.5 0.9 0.7)
captured=(tests/gpu/test_formats_on_cuda.py -k 'captured or drafts')
if [ "${1:-}" = --tiny ]; then # no card waits, so nothing is broken off
    tiny=(--tiny) own=torch threads=1 minutes=(60 60 60) SECONDS_MOST=3600
    captured=(tests/device/test_graphs.py::test_captured_steps_give_the_tokens_of_others)
elif [ -d "$KIT" ]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$KIT/site" "$KIT"/*.whl
    export PYTHONPATH="$KIT/site:$KIT/parts"
fi
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}src:." DG_JIT_CACHE_DIR="${DG_JIT_CACHE_DIR:-$OUT/jit}" OMP_NUM_THREADS=$threads
failed=() unrun=()

# part SECONDS NAME COMMAND ...
part() {
    local limit=$1 name=$2 left=$((SECONDS_MOST - SECONDS)) status
    shift 2
    [ "$left" -ge 20 ] || { unrun+=("$name"); return; }
    [ "${#tiny[@]}" = 0 ] && [ "$limit" -le "$left" ] || limit=$left
    echo "== $SECONDS s: $name"
    timeout --kill-after 5 "$limit" "$@" >"$OUT/$name.txt" 2>"$OUT/$name.err"
    status=$?
    tail -n 4 "$OUT/$name.txt" | cut -c1-400
    [ "$status" = 0 ] && return
    failed+=("$name ($status)")
    tail -n 3 "$OUT/$name.err" | cut -c1-400
}

# measure SECONDS NAME PROGRAM ARGUMENT ...
measure() {
    local limit=$1 name=$2 program=$3
    shift 3
    part "$limit" "$name" "$PYTHON" "benchmarks/gpu/$program" "${tiny[@]}" "$@"
}

# steps SECONDS NAME ARGUMENT ...
steps() {
    local limit=$1 name=$2
    shift 2
    measure "$limit" "$name" engine_steps.py --prompt 2048 --new 48 "$@"
}

cases='index top|of 8192 rows|656-byte rows, 128 heads|dense FP8, (1|16|64|256) x'

part 80 captured "$PYTHON" -m pytest -q -p no:cacheprovider "${captured[@]}"
steps 110 engines --batches 1,32,128
measure 110 kernels run.py --provider "$own" --minutes "${minutes[0]}" --only masked,decode,index,dense --like "$cases"
measure 70 slice slice.py --minutes "${minutes[1]}" --batches 1,32,128 --contexts 4096
steps 60 engines-drafts --batches 1,32 --drafts 2
steps 60 engines-fp8 --batches 32,128 --kv-format fp8
steps 60 engines-own --batches 1,128 --without deep_gemm,flash_mla
steps 60 engines-tcp --batches 32 --transport tcp
measure 60 mega-moe mega_moe.py
measure 60 pushes pushes.py --rounds 4
measure 60 slice-fp8 slice.py --minutes "${minutes[2]}" --batches 128 --contexts 4096,16384 --kv-format fp8
grep -h '^step .*: ' "$OUT"/*.txt
echo "== $SECONDS s: end; failed: ${failed[*]:-none}; not begun: ${unrun[*]:-none}"
[ "${#failed[@]}" = 0 ]
