"""What explain says is what runs."""
