"""The way of a call: keys, plans, routes, conversions, errors."""
