"""Checkpoint folders: one file of pieces per rank, and a manifest that commits them.

    state        what the engine hands over: the runs of one rank
    files        atomic writes, checksums
    manifest     zero/manifest.json: what it says, how it is read and checked
    save         writing a folder, in phases; see [Note: Commit order] there
    load         reading any element of a folder, whatever layout the reader has
    whole        whole tensors of a folder, read as they are asked for
    consolidate  stand-alone script: a folder to Hugging Face weights, with numpy only

Nothing is imported here, so that `hf-zero consolidate` and `hf-zero inspect` need not wait for torch.
"""
