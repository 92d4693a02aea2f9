"""Units: parameters that are gathered and reduced together, and the memory they live in."""
