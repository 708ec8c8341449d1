"""What the ops that work on rows share: layouts, problems, configs, the base of their variants."""
