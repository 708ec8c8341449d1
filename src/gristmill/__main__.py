"""`python -m gristmill`: the same as the `gristmill` command."""

from gristmill.cli import main

if __name__ == "__main__":
    main()
