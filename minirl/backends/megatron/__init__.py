"""The Megatron backend: models of Megatron Bridge in the layouts of Megatron-Core."""
