"""Tools and environments: their definitions, the processes they run in, and the turns of completions that use them."""
