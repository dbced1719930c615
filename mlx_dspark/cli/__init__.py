"""The command line: text on standard output, everything else on standard error."""
