"""The whole control loop without ranks: real detector, controller and planner, simulated trainer.

``trace`` reads what happens to the links, ``links`` simulates iterations under it, ``trainer``
reports them as ranks would, ``contenders`` compares ways to train through the same trace.
"""
