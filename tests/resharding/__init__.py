"""Conversions of layouts, their plans and transposes."""
