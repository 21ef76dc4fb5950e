"""``python -m anycell``."""

from anycell.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
