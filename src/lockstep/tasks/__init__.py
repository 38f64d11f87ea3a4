"""The task, the trainer and its loop, callbacks, and what is done with a trained model."""
