"""SPMD rules: the notation, the book of rules, values and gradients of ops on every layout."""
