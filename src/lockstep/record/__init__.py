"""What a run shows and writes down: rows of metrics, logs, the screen, its folder."""
