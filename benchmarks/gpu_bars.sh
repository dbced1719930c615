#!/bin/sh
# The bars that need a GPU, one after another: sh benchmarks/gpu_bars.sh FOLDER [PIECE...]
# Each piece ends within its limit and leaves its log in FOLDER, and its JSON: batching and modes at their end, those of
# kernel_bars.py as they go. Without pieces, all of them (some 25 minutes on an H200). PYTHON names the interpreter.
set -u
folder=${1:?usage: sh benchmarks/gpu_bars.sh FOLDER [PIECE...]}
shift
pieces="warm kernels attention forward4 forward8 batching modes pair pair8b products"
[ $# -gt 0 ] || set -- $pieces
for piece; do
  case " $pieces " in
    *" $piece "*) ;;
    *) echo "no piece is called $piece: name some of $pieces" >&2 && exit 2 ;;
  esac
done
python=${PYTHON:-python}
mkdir -p "$folder" || exit 1
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD" PYTHONUNBUFFERED=1

bars="$python benchmarks/kernel_bars.py --no-wide-gemm"
for piece; do
  json="--json $folder/$piece.json"
  case $piece in
    warm) limit=120 run="$python benchmarks/gpu_warm.py" ;;
    kernels) limit=240 run="$python -m mlx_dspark kernels smollm2-135m" ;;
    attention) limit=100 run="$bars --only attention --geometries --turns 5 --seconds 90 $json" ;;
    forward4) limit=240 run="$bars --only forward --bits 4 --turns 4 --seconds 60 $json" ;;
    forward8) limit=240 run="$bars --only forward --bits 8 --turns 4 --seconds 60 $json" ;;
    batching) limit=420 run="$python benchmarks/batching.py --modes auto --contents chat --new 64 --turns 4 $json" ;;
    modes) limit=420 run="$python benchmarks/modes.py --no-stock --new 128 --trials 1 --caps 3 5 $json" ;;
    pair) limit=150 run="$bars --only pair --seconds 120 $json" ;;
    pair8b) limit=240 run="$bars --only pair8b --bits 4 8 --seconds 60 $json" ;;
    products) limit=200 run="$python benchmarks/small_m.py --only products --widths 1 8 16 $json" ;;
  esac
  echo "== $piece"
  timeout -s INT -k 20 "$limit" $run 2>&1 | tee "$folder/$piece.log"
done
