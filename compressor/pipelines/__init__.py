"""Whole jobs, from the user's input to a finished directory."""
