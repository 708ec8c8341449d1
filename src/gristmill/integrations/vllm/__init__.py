"""gristmill in vLLM: what its entry points (see plugin.py) register there.

Importing this package imports nothing of vLLM, and `import gristmill` does not import it.
"""
