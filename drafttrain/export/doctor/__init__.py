"""What is wrong with a draft as a serving engine will load it: a lint of its files, and a trial of what it accepts."""
