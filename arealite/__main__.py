"""Runs the `arealite` command: `python -m arealite train …`."""

from arealite.cli.entry import main

if __name__ == "__main__":
    main()
