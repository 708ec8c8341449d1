"""Mixtures of experts: models, inputs, routing, what is right, how it is told."""
