"""Memory planning: the formulas of DeepSpeed, and plans that the code of the engine makes on the meta device."""
