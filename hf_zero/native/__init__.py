"""The compiled library: the Adam update and asynchronous file access. Importing this package does not load it."""
