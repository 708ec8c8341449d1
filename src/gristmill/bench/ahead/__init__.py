"""Compiling what peers run before any timing, in processes of their own."""
