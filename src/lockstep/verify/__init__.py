"""Whether every way of running a task gives the same answer: runs them for a few steps and compares."""
