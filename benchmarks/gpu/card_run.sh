#!/usr/bin/env bash
# One run on one card in at most 590 s: what a card has to say of this commit, most wanted first.
#
#     bash benchmarks/gpu/kit.sh              before, where there is a network: .kit, which travels with the tree
#     OUT=folder bash benchmarks/gpu/card_run.sh [--tiny]
#
# Each part has a limit and a file of its own in OUT, and none begins when SECONDS_MOST are over. `--tiny` runs every part
# small, on a CPU too. The parts that fail are named in the last line; the exit status is 1 when there are some.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=${OUT:-build/card} SECONDS_MOST=${SECONDS_MOST:-585} KIT=.kit PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
tiny=()
[ "${1:-}" = --tiny ] && tiny=(--tiny)
if [ -d "$KIT" ] && [ "${#tiny[@]}" = 0 ]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$KIT/site" "$KIT"/*.whl
    export PYTHONPATH="$KIT/site:$KIT/parts"
fi
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}src:." DG_JIT_CACHE_DIR="${DG_JIT_CACHE_DIR:-$OUT/jit}" OMP_NUM_THREADS=4
failed=() unrun=()

# part SECONDS NAME COMMAND ...
part() {
    local limit=$1 name=$2 left=$((SECONDS_MOST - SECONDS)) status
    shift 2
    [ "$left" -ge 20 ] || { unrun+=("$name"); return; }
    [ "$limit" -le "$left" ] || limit=$left
    echo "== $SECONDS s: $name"
    timeout --kill-after 5 "$limit" "$@" >"$OUT/$name.txt" 2>"$OUT/$name.err"
    status=$?
    tail -n 4 "$OUT/$name.txt" | cut -c1-400
    [ "$status" = 0 ] && return
    failed+=("$name ($status)")
    tail -n 3 "$OUT/$name.err" | cut -c1-400
}

steps() { local limit=$1 name=$2; shift 2; part "$limit" "$name" "$PYTHON" benchmarks/gpu/engine_steps.py "${tiny[@]}" "$@"; }
cases='index top|of 8192 rows|656-byte rows, 128 heads|dense FP8, (1|16|64|256) x'
own=triton minutes=1.5
[ "${#tiny[@]}" = 0 ] || own=torch minutes=0.3

if [ "${#tiny[@]}" = 0 ]; then
    part 80 captured "$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu/test_formats_on_cuda.py -k 'captured or drafts'
fi
steps 110 engines --batches 1,32,128 --prompt 2048 --new 48
part 110 kernels "$PYTHON" benchmarks/gpu/run.py "${tiny[@]}" --provider "$own" --minutes "$minutes" \
    --only masked,decode,index,dense --like "$cases"
part 70 slice "$PYTHON" benchmarks/gpu/slice.py "${tiny[@]}" --minutes 0.9 --batches 1,32,128 --contexts 4096
steps 60 engines-drafts --batches 1,32 --prompt 2048 --new 48 --drafts 2
steps 60 engines-fp8 --batches 32,128 --prompt 2048 --new 48 --kv-format fp8
steps 60 engines-own --batches 1,128 --prompt 2048 --new 48 --without deep_gemm,flash_mla
steps 60 engines-tcp --batches 32 --prompt 2048 --new 48 --transport tcp
part 60 mega-moe "$PYTHON" benchmarks/gpu/mega_moe.py
part 60 pushes "$PYTHON" benchmarks/gpu/pushes.py "${tiny[@]}" --rounds 4
part 60 slice-fp8 "$PYTHON" benchmarks/gpu/slice.py "${tiny[@]}" --minutes 0.7 --batches 128 --contexts 4096,16384 \
    --kv-format fp8
echo "== $SECONDS s: end; failed: ${failed[*]:-none}; not begun: ${unrun[*]:-none}"
[ "${#failed[@]}" = 0 ]
