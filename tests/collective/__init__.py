"""What is sent: collectives, their counts, wire formats."""
