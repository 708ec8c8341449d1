"""DTensor: how gristmill's ops are sharded over a mesh.

Importing this registers the rules. gristmill does so by itself when an op first sees a DTensor;
nobody has to import it.
"""

from __future__ import annotations

from gristmill.integrations.dtensor.registration import register
from gristmill.integrations.dtensor.rules import RULES

__all__ = ["RULES", "register"]

register()
