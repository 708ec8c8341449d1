"""Whole models decoding in vLLM."""
