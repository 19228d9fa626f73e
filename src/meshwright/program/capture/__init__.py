"""From a model, or a step by hand, to a program: exported, completed, partitioned."""
