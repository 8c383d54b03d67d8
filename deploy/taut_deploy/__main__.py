"""``python -m taut_deploy`` is the ``taut`` command."""

import sys

from taut_deploy.cli import main

if __name__ == "__main__":
    sys.exit(main())
