"""A transformer block, training and decoding, with its pieces exchanged."""
