"""Ranks on this host, forked and supervised."""
