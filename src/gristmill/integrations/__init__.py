"""Where gristmill plugs into other programs. The rest of the package imports none of this."""
