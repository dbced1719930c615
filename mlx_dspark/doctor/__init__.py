"""Checks that run something each, and what to do where one fails."""
