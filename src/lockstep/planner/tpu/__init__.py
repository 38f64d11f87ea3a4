"""Plans for slices of Cloud TPUs: a step is traced by torch_xla and compiled by libtpu, without any TPU."""
