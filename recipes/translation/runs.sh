#!/usr/bin/env bash
# Trains, evaluates and compares as README.md says, in some eight minutes on two quiet cores.
#
#   bash recipes/translation/runs.sh outputs/translation
#   DTYPE=float64 bash recipes/translation/runs.sh outputs/double    # the same, with short runs in fp64
set -euo pipefail
recipe=$(dirname "${BASH_SOURCE[0]}") out=$1
export OMP_NUM_THREADS=1 # for two processes on two cores
python "$recipe/small.py" "$out/small"

run=("$recipe/run_translation.py" --report_to none --disable_tqdm True)
# 2240 sentences are 70 steps of 32 for one process and for two.
short=("${run[@]}" --model_name_or_path "$out/small" --do_train --max_train_samples 2240 --max_steps 100
    --learning_rate 2e-3 --warmup_steps 20 --logging_steps 1 --save_strategy no --dtype "${DTYPE:-float32}")
python "${short[@]}" --output_dir "$out/plain" --use_cpu True --per_device_train_batch_size 32
python "${short[@]}" --output_dir "$out/plain-halves" --use_cpu True --per_device_train_batch_size 16 --gradient_accumulation_steps 2
hf-zero launch --num_gpus=1 "${short[@]}" --output_dir "$out/zero2-one" --per_device_train_batch_size 32 \
    --zero "$recipe/ds_config_zero2.json"
for stage in 0 2 3; do
    hf-zero launch --num_gpus=2 "${short[@]}" --output_dir "$out/zero$stage" --per_device_train_batch_size 16 \
        --zero "$recipe/ds_config_zero$stage.json"
done

zero3=(--output_dir "$out/trained" --zero "$recipe/ds_config_zero3.json")
hf-zero launch --num_gpus=2 "${run[@]}" "${zero3[@]}" --model_name_or_path "$out/small" --do_train --max_steps 1400 \
    --learning_rate 3e-3 --warmup_steps 100 --per_device_train_batch_size 16 \
    --train_sampling_strategy group_by_length --save_steps 1400 --logging_steps 100
# Nothing is trained here: this is ZeRO inference. 224 sentences fill the batches of both processes.
hf-zero launch --num_gpus=2 "${run[@]}" "${zero3[@]}" --model_name_or_path "$out/trained" --do_eval \
    --predict_with_generate --max_eval_samples 224 --per_device_eval_batch_size 16
python "$recipe/report.py" "$out" --output "$out"
