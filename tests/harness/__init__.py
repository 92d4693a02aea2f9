"""What the tests share: worker processes (`ranks`), small `models`, the one-process `reference`."""
