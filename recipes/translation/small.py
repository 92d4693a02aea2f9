"""Makes a T5 that is small enough for a laptop, with a tokenizer of the text that it is to learn.

    python recipes/translation/small.py outputs/translation/small

The folder stands for google-t5/t5-small where the Hub cannot be reached. The weights are random.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __package__ in (None, ""):  # started as a file, not with -m: the clone is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration, set_seed

from recipes.translation.pairs import load_pairs

PAD, END = "<pad>", "</s>"  # A translation starts after the first, and ends with the second.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source_lang", default="en")
    parser.add_argument("--target_lang", default="ro")
    parser.add_argument("--vocab_size", type=int, default=2000)
    parser.add_argument("--d_model", type=int, default=128)
    parser.add_argument("--num_layers", type=int, default=2, help="in the encoder, and as many in the decoder")
    args = parser.parse_args()

    train, _ = load_pairs(args.source_lang, args.target_lang)
    trained = ByteLevelBPETokenizer()
    texts = [text for pair in train for text in pair.values()]
    trained.train_from_iterator(texts, args.vocab_size, special_tokens=[PAD, END], show_progress=False)
    trained.post_processor = TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, pad_token=PAD, eos_token=END)

    set_seed(42)
    config = T5Config(
        vocab_size=args.vocab_size,
        d_model=args.d_model,
        d_kv=args.d_model // 4,
        d_ff=4 * args.d_model,
        num_layers=args.num_layers,
        num_heads=4,
        decoder_start_token_id=tokenizer.pad_token_id,
        dropout_rate=0.0,  # So that one process and two compute the same.
    )
    model = T5ForConditionalGeneration(config)
    model.save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)
    print(f"{args.folder}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens, {len(train)} sentences")


if __name__ == "__main__":
    main()
