"""Plans for slices of Cloud TPUs: torch_xla traces a step and libtpu compiles it, without any TPU."""
