#!/usr/bin/env bash
# Makes the default model's drafter from openly licensed prompts.
#
#     benchmarks/default_drafter.sh SOURCES OUT [flags of `mlx-dspark train` for the training]
#
# SOURCES holds what benchmarks/default_drafter_prompts.py reads: wheels and JSONL files. OUT gets prompts, answers and
# the drafter; given again, it goes on. Environment: ANSWER_SECONDS (400), TRAIN_SECONDS (600), GPUS (1; 0 for none),
# PROCESSES for each of them (2), PYTHON (python).
# Answers of all processes add up. The first GPU trains. Prompts are answered twice, once greedily and once drawn.
set -euo pipefail
sources=$1 out=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python} gpus=${GPUS:-1} each=${PROCESSES:-2}
parts=$((each * (gpus > 0 ? gpus : 1)))
mkdir -p "$out"

if [ ! -s "$out/prompts.jsonl" ]; then
  "$python" -W ignore "$here/default_drafter_prompts.py" "$sources" > "$out/prompts.jsonl"
  "$python" "$here/default_drafter_openers.py" > "$out/openers.jsonl"
  # The place of a prompt says whether its answer is greedy: the second reading is shifted by one.
  { cat "$out/prompts.jsonl"; tail -n +2 "$out/prompts.jsonl"; head -1 "$out/prompts.jsonl"; } > "$out/twice.jsonl"
  split --number="l/$parts" --numeric-suffixes --suffix-length=2 "$out/twice.jsonl" "$out/part-"
fi

on() { # GPU COMMAND...
  local gpu=$1
  shift
  if [ "$gpus" -gt 0 ]; then CUDA_VISIBLE_DEVICES=$gpu "$@"; else "$@"; fi
}

data=()
for part in $(seq 0 $((parts - 1))); do
  name=$(printf %02d "$part")
  mv -n "$out/part-$name" "$out/part-$name.jsonl" 2> /dev/null || true
  data+=(--data "$out/answers-$name")
  [ -f "$out/made-$name/config.json" ] && continue
  on $((part / each)) "$python" -m mlx_dspark train --output "$out/made-$name" --data "$out/answers-$name" \
    --prompts "$out/part-$name.jsonl" --self-prompts 400000 --self-openers "$out/openers.jsonl" --seed "$part" \
    --data-rows "${ROWS:-1024}" --data-time-limit "${ANSWER_SECONDS:-400}" --answer-tokens 256 \
    --steps 1 --batch 1 --anchors 1 --held-out-prompts 0 > "$out/answers-$name.log" 2>&1 &
done
wait

on 0 "$python" -m mlx_dspark train --output "$out/drafter" "${data[@]}" --time-limit "${TRAIN_SECONDS:-600}" \
  --batch 40 --anchors 64 --layers 3 --bits 4 --seed 1 --checkpoint-every 1000 "$@"
