"""The choice of a strategy: prices, types, ties."""
