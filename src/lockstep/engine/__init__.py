"""Runs the steps of a loop: batches, backward passes, optimizers, control between steps."""
