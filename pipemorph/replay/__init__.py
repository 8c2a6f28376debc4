"""Control loop without ranks: real detector, controller and planner, simulated trainer.

``link_trace`` reads the states of the links, ``simulated_links`` simulates iterations under them,
``adaptive_trainer`` reports them as ranks would, ``baselines`` compares ways to train through the
same trace.
"""
