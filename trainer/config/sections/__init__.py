"""Sections of TrainConfig, one file each.

A field checks its own range; trainer.planning.checks checks relations between keys. No file here has
"from __future__ import annotations": pydantic would compile every annotation string again at start-up.
"""
