"""`python -m mlx_dspark`: the command line."""

from mlx_dspark.cli.main import main

if __name__ == "__main__":
    main()
