"""``torch.compile`` with W apart: backends whose compiled backward can defer weight gradients to W.

See ``docs/split-backward.md``.
"""
