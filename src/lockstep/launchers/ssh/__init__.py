"""Runs on several hosts that are reached by OpenSSH or gcloud."""
