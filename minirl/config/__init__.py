"""Settings: every key of a run, its default, its range, and which combinations are refused."""
