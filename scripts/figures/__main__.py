"""`python -m scripts.figures`."""

from scripts.figures import main

main()
