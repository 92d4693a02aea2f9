"""Checkpoint folders: one file of shards per rank, and a manifest that commits them.

    consolidate       stand-alone script: a folder to Hugging Face weights, with numpy only; how files are read
    manifest          zero/manifest.json: its content, how it is written and read, what it commits
    latest            which folder a checkpoint goes to and comes from
    writer            writing a folder, in phases; see [Note: Commit order] there
    reader            reading any element of a folder, whatever layout the reader has
    lazy_state_dict   unsharded tensors of a folder, read as they are asked for
    collective        saving and loading an engine's state, all ranks together; agreement: on what
    optimizer_state, scheduler_state, frozen_digests   the parts of it

Nothing is imported here, so that `hf-zero consolidate` and `hf-zero inspect` need not wait for torch.
"""
