"""Compare scheduling policies on the jobs of a trace."""
