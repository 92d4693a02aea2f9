"""Trains a T5 to translate, and lets it translate, with Seq2SeqTrainer under ZeRO: transformers' example, plus --zero.

    hf-zero launch --num_gpus=2 recipes/translation/run_translation.py \
        --zero recipes/translation/ds_config_zero3.json --model_name_or_path outputs/translation/small \
        --per_device_train_batch_size 1 --output_dir outputs/translation/first --fp16 \
        --do_train --max_train_samples 500 --num_train_epochs 1 --source_lang en --target_lang ro

README.md in this folder lists more. Every argument of `transformers.Seq2SeqTrainingArguments` works as usual.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file, not with -m: the clone is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from sacrebleu.metrics import BLEU, CHRF
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, HfArgumentParser, set_seed

from hf_zero import Seq2SeqTrainer, Seq2SeqTrainingArguments
from hf_zero.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint
from recipes.translation.pairs import Pair, load_pairs


@dataclass
class Arguments:
    """These are the arguments of transformers' example that this script has, and --fp32_dir."""

    model_name_or_path: str = field(metadata={"help": "a folder, such as small.py makes, or a hub id"})
    dtype: str = field(
        default="float32", metadata={"help": "of the weights, as they are trained without --fp16, --bf16"}
    )
    source_lang: str = field(default="en")
    target_lang: str = field(default="ro")
    dataset_name: str | None = field(default=None, metadata={"help": "a hub dataset such as wmt16 [packaged text]"})
    dataset_config_name: str | None = field(default=None, metadata={"help": "such as ro-en"})
    source_prefix: str = field(default="", metadata={"help": 'such as "translate English to Romanian: "'})
    max_source_length: int = field(default=64, metadata={"help": "tokens of a sentence that are read"})
    max_target_length: int = field(default=64, metadata={"help": "tokens of its translation, in generation too"})
    num_beams: int = field(default=1)
    max_train_samples: int | None = field(default=None)
    max_eval_samples: int | None = field(default=None, metadata={"help": "of held-out and of training sentences"})
    fp32_dir: str | None = field(default=None, metadata={"help": "write the last checkpoint's fp32 weights there"})


def read_pairs(options: Arguments) -> dict[str, list[Pair]]:
    """The pairs to train on, and those to evaluate on: some of the same, and others that were held out."""
    if options.dataset_name is None:
        train, held_out = load_pairs(options.source_lang, options.target_lang)
    else:
        from datasets import load_dataset

        parts = load_dataset(options.dataset_name, options.dataset_config_name)
        train, held_out = parts["train"]["translation"], parts["validation"]["translation"]
    train, most = train[: options.max_train_samples], options.max_eval_samples
    return {"train": train, "learnt": train[:most], "held_out": held_out[:most]}


def encode(pairs: list[Pair], tokenizer: Any, options: Arguments) -> list[dict[str, list[int]]]:
    """The rows for the model. The labels are the translation."""
    sources = [options.source_prefix + pair[options.source_lang] for pair in pairs]
    targets = [pair[options.target_lang] for pair in pairs]
    inputs = tokenizer(sources, max_length=options.max_source_length, truncation=True)["input_ids"]
    labels = tokenizer(text_target=targets, max_length=options.max_target_length, truncation=True)["input_ids"]
    return [{"input_ids": row, "labels": label} for row, label in zip(inputs, labels, strict=True)]


def token_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    """The mean loss of the tokens of all ranks. T5's own mean is that of one rank, whose sentences may be shorter."""
    logits = outputs.logits.to(torch.promote_types(outputs.logits.dtype, torch.float32)).flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def write_translations(path: Path, pairs: list[Pair], texts: list[str], options: Arguments) -> None:
    """Write a line for each sentence: the sentence, its translation, and what the model makes of it."""
    with path.open("w", encoding="utf-8", newline="") as file:
        for pair, text in zip(pairs, texts, strict=False):  # Sentences may be there twice, to fill the last batch.
            csv.writer(file, delimiter="\t").writerow([pair[options.source_lang], pair[options.target_lang], text])


def main() -> None:
    options, args = HfArgumentParser((Arguments, Seq2SeqTrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(options.model_name_or_path, dtype=options.dtype)
    args.generation_max_length, args.generation_num_beams = options.max_target_length, options.num_beams
    pairs = read_pairs(options)
    rows = {part: encode(pairs[part], tokenizer, options) for part in pairs}

    def decode(ids: Any) -> list[str]:
        texts: list[str] = tokenizer.batch_decode(
            np.where(ids < 0, tokenizer.pad_token_id, ids), skip_special_tokens=True
        )
        return texts

    def scores(predicted: Any) -> dict[str, float]:
        texts, references = decode(predicted.predictions), [decode(predicted.label_ids)]
        return {
            score.name: score.score
            for score in (metric.corpus_score(texts, references) for metric in (BLEU(), CHRF()))
        }

    trainer = Seq2SeqTrainer(
        model=model,
        args=args,
        train_dataset=rows["train"],
        eval_dataset=rows["held_out"],
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        compute_loss_func=token_loss,
        compute_metrics=scores if args.predict_with_generate else None,
    )
    if args.do_train:
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_state()
    if args.do_eval:
        results: dict[str, float] = {}
        for part in ("learnt", "held_out"):
            predicted = trainer.predict(rows[part], metric_key_prefix=part)
            results |= predicted.metrics
            if args.predict_with_generate and trainer.is_world_process_zero():
                texts = decode(predicted.predictions)
                write_translations(Path(args.output_dir) / f"{part}.tsv", pairs[part], texts, options)
        trainer.log_metrics("eval", results)
        trainer.save_metrics("eval", results)
    if options.fp32_dir is not None:
        checkpoint = f"{args.output_dir}/checkpoint-{trainer.state.global_step}"
        model = AutoModelForSeq2SeqLM.from_pretrained(options.model_name_or_path, dtype="float32")
        load_state_dict_from_zero_checkpoint(model, checkpoint).save_pretrained(options.fp32_dir)


if __name__ == "__main__":
    main()
