"""The annexes: rooms that carry nothing of the core. No core room imports from here."""
