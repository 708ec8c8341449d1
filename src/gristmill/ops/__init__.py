"""The ops: one folder each, and the object that makes a torch op of what stands there."""
