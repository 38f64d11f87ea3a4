"""Who takes part in a run, how they meet and talk, and whether they get on."""
