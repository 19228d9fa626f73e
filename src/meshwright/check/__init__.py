"""``meshwright check``: rules against yardsticks that this project did not write."""
