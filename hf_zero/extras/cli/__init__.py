"""The command line, `hf-zero`: one file per command, put together by main.py."""
