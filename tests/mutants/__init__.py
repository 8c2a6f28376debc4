"""Random mutants of the Python product: how many of them do the cheap tests find?

A mutant is the product with one small change: ``<`` for ``<=``, a call dropped, a constant one
higher. Tests that still pass under it do not check that line. :mod:`mutants.drawing` finds and
draws the changes, :mod:`mutants.code` puts one into the functions of a running process,
:mod:`mutants.measuring` finds which tests execute the changed statements,
:mod:`mutants.judging` runs those tests against the mutant in a forked process, and
:mod:`mutants.report` prints the result.

    PYTHONPATH=tests python -m mutants --seed 1 --count 200

No file changes and nothing is imported twice: one process imports the product and collects the
tests, and each mutant is a fork of it. Processes that a test starts by command import the original,
so only what a test executes in its own process counts. Default values of arguments and code outside
functions are not mutated.
"""
