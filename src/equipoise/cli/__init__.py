"""The command line: one file a command group; each parses, calls and prints. Heavy imports stay inside handlers."""
