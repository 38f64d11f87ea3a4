"""How to train: the RunConfig, where it is read and what its values mean."""
