"""`python -m lancet_kernels` is the command `lancet`."""

import sys

from lancet_kernels.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
