"""`python -m ntk_iterncgp` is the command `ntk-iterncgp`."""

import sys

from ntk_iterncgp.cli import main

if __name__ == "__main__":
    sys.exit(main())
