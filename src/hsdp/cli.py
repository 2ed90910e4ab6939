"""The entry point of the command `hsdp`: the commands themselves are in commands.py, which needs typer."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process; exits with its status."""
    try:
        from hsdp.commands import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit("error: the hsdp command needs typer, which is not installed: pip install 'hsdp[train]'")
    app(prog_name="hsdp")


if __name__ == "__main__":
    main()
