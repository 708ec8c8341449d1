"""Norms into FP8: what those of rms_norm and of layer_norm have in common."""
