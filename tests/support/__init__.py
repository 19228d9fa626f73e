"""What tests share: models, oracles, comparisons, real processes, hypothesis strategies."""
