"""`python -m optpipe` is the command line, so that `torchrun -m optpipe train ...` works."""

from optpipe.cli import main

if __name__ == "__main__":
    main()
