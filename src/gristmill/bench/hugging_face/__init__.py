"""Whole models of Hugging Face's transformers, patched or not."""
