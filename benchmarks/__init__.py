"""How long fanin takes beside others: `python -m benchmarks --help`."""
