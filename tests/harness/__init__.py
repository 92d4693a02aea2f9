"""The tests share this: worker processes (`ranks`), `scripts` on them, small `models`, the one-process `reference`."""
