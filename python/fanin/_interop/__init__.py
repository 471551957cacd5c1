"""Other libraries' arrays and streams: what they are, how they come in, how sums go out as they came."""
