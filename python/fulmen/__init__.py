"""Fulmen: a deep-learning compiler that says who runs what, and why."""

from fulmen import _core
