"""What choosing costs the host."""
