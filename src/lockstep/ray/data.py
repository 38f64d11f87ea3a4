"""Ray Data as a source of examples."""
