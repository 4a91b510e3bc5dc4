"""The FSDP2 backend: Hugging Face models, sharded with DTensor."""
