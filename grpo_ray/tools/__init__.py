"""Tools and environments: what they are, the processes they run in, and the turns of a completion that uses them."""
