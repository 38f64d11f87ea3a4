"""The task, the run that it is trained in, the loop and what happens at its boundaries."""
