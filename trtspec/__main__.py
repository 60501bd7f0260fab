"""Runs the command line for `python -m trtspec`."""

from trtspec.cli.app import main

if __name__ == "__main__":
    main()
