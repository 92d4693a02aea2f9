"""Learning rate schedules of DeepSpeed's `scheduler` block."""
