"""Random configurations x odd models x world sizes, each against one process with torch.optim.

`models*` hold the models, `cases` draws a case from a seed, `reference` trains it in one process and `ranks` under
hf_zero, `judge` says how near is near enough and which errors are expected, `campaign` runs many of them.
scripts/fuzz.py is the command, tests/fuzz/test_fuzz.py the part of it that every change runs.
"""
