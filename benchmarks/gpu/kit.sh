#!/usr/bin/env bash
# Collects what a machine with a card and no network needs, and prints the one command that uses it.
#
#     bash benchmarks/gpu/kit.sh --list      what is collected, why, and how large it is
#     bash benchmarks/gpu/kit.sh [FOLDER]    collects it in FOLDER (.kit), from the package index that pip is set to
#
# For x86-64, Python 3.12, torch 2.11 with CUDA 13, and triton 3.6. That machine has torch, triton, numpy, attrs,
# safetensors, pytest, pytest-xdist and hypothesis; DeepGEMM compiles its kernels there with nvcc. FlashMLA has no wheel
# of its own: its library and its Python file are taken from vLLM's, which was built for the same torch.

set -euo pipefail

MOST_MIB=64 # what may travel, the working tree included
PYTHON=${PYTHON:-python3}
VLLM=vllm==0.24.0
# package, MiB, why
WHEELS="
msgspec==0.22.0 0.2 pdinfer needs it
xxhash==4.1.0 0.5 pdinfer needs it
sgl-deep-gemm==0.1.4.post1 4.5 DeepGEMM, a rival and a provider
apache-tvm-ffi==0.1.11 2.6 DeepGEMM needs it
"
PARTS="
vllm/_flashmla_C.abi3.so 1.7 FlashMLA, a rival and a provider
vllm/third_party/flashmla/__init__.py 0.1 its package
vllm/third_party/flashmla/flash_mla_interface.py 0.1 its functions
"

list() {
    echo "wheels:"
    sed '/^$/d; s/^/    /' <<<"$WHEELS"
    echo "parts of $VLLM:"
    sed '/^$/d; s/^/    /' <<<"$PARTS"
    awk -v most=$MOST_MIB 'NF { sum += $2 } END { printf "MiB in all: %.1f of %d\n", sum, most }' <<<"$WHEELS$PARTS"
}

download() { # FOLDER PACKAGE
    local platforms=()
    for tag in _2_28 _2_27 _2_24 _2_17 2014 1; do
        platforms+=(--platform "manylinux${tag}_x86_64")
    done
    "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        "${platforms[@]}" --dest "$1" "$2"
}

collect() { # FOLDER
    local into=$1
    mkdir -p "$into/parts/flash_mla"
    whole=$(mktemp -d)
    trap 'rm -rf "$whole"' EXIT
    while read -r package _; do
        [ -z "$package" ] || download "$into" "$package"
    done <<<"$WHEELS"
    download "$whole" "$VLLM"
    "$PYTHON" - "$whole" "$into/parts" "$PARTS" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

folder, into, parts = sys.argv[1:]
(wheel,) = Path(folder).glob("vllm-*.whl")
with zipfile.ZipFile(wheel) as whole:
    for line in parts.split("\n"):
        if line:
            whole.extract(line.split()[0], into)
PYTHON
    echo "from vllm.third_party.flashmla.flash_mla_interface import *" >"$into/parts/flash_mla/__init__.py"
    local kib
    kib=$(du -sk "$into" | cut -f1)
    echo "$into holds $((kib / 1024)) MiB of the $MOST_MIB that may travel with the working tree"
    [ "$kib" -lt $((MOST_MIB * 1024)) ] || exit 1
}

command_of() { # FOLDER
    cat <<EOT
Take the working tree and $1 to the machine, and run there in the root of the tree:

    python3 -m pip install -q --no-index --no-deps --no-compile --target $1/site $1/*.whl &&
    export PYTHONPATH=$1/site:$1/parts:src:. &&
    python3 benchmarks/gpu/run.py --minutes 8

Instead of the last line, or after it, each in at most ten minutes:

    python3 -m pytest -q tests/gpu
    python3 benchmarks/gpu/slice.py
    python3 benchmarks/gpu/pushes.py
    python3 benchmarks/gpu/tune.py masked --minutes 8
EOT
}

case "${1:-}" in
--list) list ;;
-*) echo "usage: bash benchmarks/gpu/kit.sh [--list | FOLDER]" >&2 && exit 2 ;;
*)
    collect "${1:-.kit}"
    command_of "${1:-.kit}"
    ;;
esac
