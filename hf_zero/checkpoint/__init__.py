"""Checkpoint folders: one file of shards per rank, and a manifest that commits them.

    format            what zero/manifest.json and the header of a rank file hold; every field and its range
    rank_reader       reading rank files in parts, with their checksums; direct_reads: past the page cache
    consolidate       a folder to Hugging Face weights; stand_alone makes these three a script that needs numpy only
    folders           which folder a checkpoint goes to and comes from, and whether it is complete
    writer            writing a folder, in phases; see [Note: Commit order] there
    reader            reading any element of a folder, whatever layout the reader has
    lazy_state_dict   unsharded tensors of a folder, read as they are asked for
    save, load        saving and loading an engine's state, all ranks together; agreement: on what
    contents          which parts of an engine are in a checkpoint
    optimizer_state, scheduler_state, frozen_digests   the parts of it

Nothing is imported here, so that `hf-zero consolidate` and `hf-zero inspect` need not wait for torch.
"""
