#!/usr/bin/env bash
# One harness's part of the headline: pass@1 of the laptop policy, GRPO through the harness, pass@1 on the same held-out tasks. The
# control learns by supervised training from the sessions that GRPO had, those that solved their task.
#   examples/headline/run.sh codex
# The same command goes on where it was stopped.
set -euo pipefail

harness=${1:?expected a harness: pi, codex, claude_code or qwen_code}
here=$(dirname "${BASH_SOURCE[0]}")
out=runs/headline/$harness

evaluate() { # MODEL FOLDER [OPTION…]
    polar eval workspace:held_out:200 --harness "$harness" --samples 1 --model "$1" --out "$out/$2" "${@:3}"
}

polar harness install "$harness"
evaluate laptop before
polar train "$here/$harness.toml" --out "$out/train"
polar plot "$out/train"
evaluate "$out/train/model" after --against "$out/before"

polar export "$out/train" --format sft
polar sft "$out/train/sft.jsonl" --model laptop --lr 5e-5 --batch 64 --out "$out/control"
evaluate "$out/control/model" control-after --against "$out/before"
