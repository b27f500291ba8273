"""`python bench/autotune.py`: the same as `lancet tune`, for those who look for the tuner here."""

import sys

from lancet_kernels.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["tune", *sys.argv[1:]]))
