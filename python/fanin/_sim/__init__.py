"""The inside of `fanin.sim`."""
