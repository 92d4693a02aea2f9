"""When parameters are whole and when gradients are reduced."""
