"""What the tests share: worker processes (`ranks`), `scripts` on them, small `models`, the one-process `reference`."""
