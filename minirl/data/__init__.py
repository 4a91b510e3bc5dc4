"""Text and rows: datasets, chat templates, packing, and which rank trains which rows."""
