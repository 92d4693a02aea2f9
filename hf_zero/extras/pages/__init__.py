"""Pictures of what a run holds: HTML pages that need nothing else."""
