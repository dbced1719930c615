#!/bin/sh
# The bars that need a GPU, one after another: sh benchmarks/gpu_bars.sh FOLDER [PIECE...]
# Each piece ends within its limit and leaves its log in FOLDER, and its JSON: batching and modes at their end, those of
# kernel_bars.py as they go. Without pieces, all of them (some 25 minutes on an H200). PYTHON names the interpreter. The
# exit code is 1 where a piece failed or ran out of time.
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
mkdir -p "$folder" || exit 1
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD" PYTHONUNBUFFERED=1

# run SECONDS SCRIPT...
run() {
  limit=$1
  shift
  { timeout -s INT -k 20 "$limit" "${PYTHON:-python}" "$@" 2>&1; echo $? > "$folder/$piece.code"; } | tee "$folder/$piece.log"
}
bars() {
  limit=$1
  shift
  run "$limit" benchmarks/kernel_bars.py --no-wide-gemm --json "$folder/$piece.json" "$@"
}

failed=
for piece; do
  echo "== $piece"
  case $piece in
    warm) run 120 benchmarks/gpu_warm.py ;;
    kernels) run 240 -m mlx_dspark kernels smollm2-135m ;;
    attention) bars 100 --only attention --geometries --turns 5 --seconds 90 ;;
    forward4) bars 240 --only forward --bits 4 --turns 4 --seconds 60 ;;
    forward8) bars 240 --only forward --bits 8 --turns 4 --seconds 60 ;;
    batching) run 420 benchmarks/batching.py --modes auto --contents chat --new 64 --turns 4 --json "$folder/$piece.json" ;;
    modes) run 420 benchmarks/modes.py --no-stock --new 128 --trials 1 --caps 3 5 --json "$folder/$piece.json" ;;
    pair) bars 150 --only pair --seconds 120 ;;
    pair8b) bars 240 --only pair8b --bits 4 8 --seconds 60 ;;
    products) run 200 benchmarks/small_m.py --only products --widths 1 8 16 --json "$folder/$piece.json" ;;
  esac
  [ "$(cat "$folder/$piece.code")" = 0 ] || failed="$failed $piece"
done
[ -z "$failed" ] || { echo "failed or out of time:$failed" >&2 && exit 1; }
