"""Recurrent mixers of any kind, replayed by running them again."""
