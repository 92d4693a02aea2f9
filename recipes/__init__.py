"""Jobs to run and to copy from. They are no part of the installed package: start them from the clone."""
