"""`python -m equipoise`: the command line."""

from equipoise.cli.main import main

if __name__ == "__main__":
    main()
