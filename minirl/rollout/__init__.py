"""Rollouts: from prompts to scored samples."""
