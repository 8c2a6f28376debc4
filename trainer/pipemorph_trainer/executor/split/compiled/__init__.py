"""``torch.compile`` with W apart: backends whose compiled backward can leave weight gradients to W.

See ``docs/split-backward.md``.
"""
