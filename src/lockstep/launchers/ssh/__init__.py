"""Runs on hosts that are reached by SSH or gcloud: what travels there, what is started, how it is watched and fetched.

Like the command line, it imports no torch: a pod command answers at once on a laptop without it.
"""
