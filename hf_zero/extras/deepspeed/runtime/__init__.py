"""Import paths of deepspeed.runtime that scripts know."""
