"""`python -m optkit`: the same as the `optkit` command."""

from optkit.app import main

if __name__ == "__main__":
    raise SystemExit(main())
