"""`python -m batchtune`."""

from batchtune.cli import main

if __name__ == "__main__":
    main()
