"""The planner: mesh, layouts, storage and stages of a model for a machine, and why."""
