"""Who this rank is: simulated ranks, launchers, Ray."""
