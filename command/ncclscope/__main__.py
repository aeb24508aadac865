"""`python -m ncclscope` is the command `ncclscope`."""

from ncclscope.cli import main

if __name__ == "__main__":
    main()
