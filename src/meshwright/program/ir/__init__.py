"""The program as a value: its graph, what its nodes say, how it is recorded, written to a file and read again."""
