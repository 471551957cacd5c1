"""The version: of a release, or with .dev0 the next one's, before its day."""

__version__ = "0.1.0.dev0"
