"""Losses and advantages: pure functions of tensors, on one process."""
