"""Pictures of what a run, a plan or a checkpoint holds: HTML pages that need nothing else, and Chrome traces."""
