"""Records a run: metrics, loggers, logs, display, timeline and the run's folder."""
