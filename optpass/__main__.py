"""`python -m optpass`."""

from optpass.cli import main

if __name__ == "__main__":
    main()
