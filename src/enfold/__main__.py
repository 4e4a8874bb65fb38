"""`python -m enfold` is the command line."""

from enfold.cli import main

if __name__ == "__main__":
    main()
