"""One policy, one file, one test. Pure: facts and the clock in, a decision out."""
