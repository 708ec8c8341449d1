"""Drop-in modules: subclasses of torch's own, so that state dicts and isinstance keep working."""

from gristmill.nn.rms_norm import RMSNorm

__all__ = ["RMSNorm"]
