#!/usr/bin/env bash
# The main job, end to end, from a fresh clone: set-up, fine-tune a real language model under ZeRO on several
# processes, checkpoint, resume and compare, consolidate, and generate text with plain transformers.
#
#   scripts/quickstart.sh [options]
#
#   --stage S       ZeRO stage: 0, 1, 2 or 3                         (default: 3)
#   --procs N       processes                                        (default: 2)
#   --steps K       optimizer steps; a checkpoint at K/2 and at K    (default: 20)
#   --layers L      only the first L of the model's 30 layers        (default: all)
#   --out DIR       where checkpoints and results go                 (default: outputs/quickstart)
#   --launcher X    torchrun or accelerate                           (default: torchrun)
#
# With the defaults it trains for less than 5 minutes on 2 CPU cores, and needs 4 GB of memory per process and 6 GB of
# disk. It runs on GPUs where there is one for each process.
set -euo pipefail
called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stage=3 procs=2 steps=20 layers= out=outputs/quickstart launcher=torchrun

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; }
die() { printf 'quickstart: %s\n' "$*" >&2; exit 2; }
title() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
[ -t 1 ] || title() { printf '\n== %s\n' "$*"; }
number() { [[ $2 =~ ^[0-9]+$ ]] && [ "$2" -ge "$3" ] || die "$1 takes a number from $3 up, not '$2'"; }

while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --stage | --procs | --steps | --layers | --out | --launcher) [ $# -ge 2 ] || die "$1 needs a value" ;;
        *) die "unknown option '$1'; --help lists them" ;;
    esac
    case $1 in
        --stage) stage=$2 ;;
        --procs) procs=$2 ;;
        --steps) steps=$2 ;;
        --layers) layers=$2 ;;
        --out) case $2 in /*) out=$2 ;; *) out=$called_from/$2 ;; esac ;;
        --launcher) launcher=$2 ;;
    esac
    shift 2
done
[[ $stage =~ ^[0-3]$ ]] || die "--stage takes 0, 1, 2 or 3, not '$stage'"
number --procs "$procs" 1
number --steps "$steps" 2
[ $((steps % 2)) = 0 ] || die "--steps takes an even number (a checkpoint is saved half-way), not '$steps'"
[ -z "$layers" ] || number --layers "$layers" 1
[[ $launcher =~ ^(torchrun|accelerate)$ ]] || die "--launcher takes torchrun or accelerate, not '$launcher'"

# Only a folder that this script made is emptied.
mark=$out/.hf_zero-quickstart
if [ -d "$out" ] && [ ! -f "$mark" ] && [ -n "$(ls -A "$out")" ]; then
    die "$out is not empty and not from an earlier run; give another folder with --out"
fi
rm -rf "$out"
mkdir -p "$out"
touch "$mark"

title "Set-up"
scripts/setup.sh
bin=${HF_ZERO_VENV:-.venv}/bin
python=$bin/python
# Nothing here comes from a hub, so nothing waits for one that cannot be reached.
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} TOKENIZERS_PARALLELISM=false

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
use_cpu=True
[ "$gpus" -ge "$procs" ] && use_cpu=False
if [ -z "${OMP_NUM_THREADS:-}" ]; then
    cores=$("$python" -c 'import os; print(len(os.sched_getaffinity(0)))')
    export OMP_NUM_THREADS=$((cores > procs ? cores / procs : 1))
fi

title "Model"
model_args=()
[ -z "$layers" ] || model_args=(--layers "$layers")
model=$("$python" -m recipes.causal_lm.prepare "${model_args[@]}")
printf '%s\n' "$model"

train() {
    local launch=("$bin/torchrun" --standalone --nproc_per_node "$procs")
    if [ "$launcher" = accelerate ]; then
        launch=("$bin/accelerate" launch --num_processes "$procs" --num_machines 1 --mixed_precision no --dynamo_backend no
            --main_process_port 0)
        [ "$procs" = 1 ] || launch+=(--multi_gpu)
        [ "$use_cpu" = False ] || export ACCELERATE_USE_CPU=true
    fi
    "${launch[@]}" recipes/causal_lm/train.py --zero "recipes/causal_lm/zero$stage.json" "${model_args[@]}" \
        --max_steps "$steps" --per_device_train_batch_size 2 --per_device_eval_batch_size 2 \
        --learning_rate 3e-4 --warmup_steps 3 --logging_steps 1 --save_steps $((steps / 2)) \
        --use_cpu "$use_cpu" --report_to none "$@"
}

title "Fine-tuning under ZeRO-$stage on $procs processes: $steps steps, checkpoints at $((steps / 2)) and $steps"
started=$SECONDS
train --output_dir "$out/first" --save_strategy steps --eval_blocks 32

title "Resuming from step $((steps / 2))"
train --output_dir "$out/resumed" --save_strategy no --eval_blocks 0 \
    --resume_from_checkpoint "$out/first/checkpoint-$((steps / 2))"
trained=$((SECONDS - started))
"$python" -m recipes.causal_lm.report resume "$out/first" "$out/resumed"

title "Consolidating checkpoint-$steps into an ordinary model folder"
"$bin/hf-zero" consolidate "$out/first/checkpoint-$steps" "$out/consolidated"

title "Plain transformers, before and after"
"$python" -m recipes.causal_lm.generate "$out/consolidated" --compare "$model"

title "What was done"
"$python" -m recipes.causal_lm.report table "$out/first" "$out/resumed" "$out/consolidated"
printf '  %s\n' "both training runs took $trained s, start-up and checkpoints counted"
