"""What RMSNorm and LayerNorm share: problems, launches, and the variants of their one kernel."""
