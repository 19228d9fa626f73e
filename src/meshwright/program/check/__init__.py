"""Whether a program is well formed, and the programs of all ranks fit together."""
