"""`launch: slurm`: a run, or every trial of a sweep, as a batch job that queues itself again until it is done."""
