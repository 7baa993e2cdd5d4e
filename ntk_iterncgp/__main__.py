"""The command `ntk-iterncgp`, also `python -m ntk_iterncgp`.

The library works without the extra `experiments`, the command does not: here it checks that the extra is installed.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

USER_ERROR = 2
# The modules of the extra `experiments` that the command cannot do without, and the packages that bring them.
NEEDED = {
    "torchvision": "torchvision",
    "matplotlib": "matplotlib",
    "yaml": "PyYAML",
    "jinja2": "Jinja2",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
}


def main() -> int:
    """Run the command of `sys.argv`.

    Returns:
        The exit code.
    """
    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if missing:
        advice = "pip install 'ntk-iterncgp[experiments]'"
        print(f"ntk-iterncgp: the command needs {', '.join(missing)}; not installed. Try {advice}.", file=sys.stderr)
        return USER_ERROR
    from ntk_iterncgp.experiments import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
