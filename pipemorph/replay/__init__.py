"""The whole control loop without ranks: real detector, controller and planner, simulated trainer.

``trace`` reads what happens to the links, ``trainer`` runs iterations under it and reports them as
ranks would, ``contenders`` compares ways to train through the same trace.
"""
