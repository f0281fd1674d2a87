"""mfsdp: post-training of Hugging Face language models with Megatron-FSDP."""

__version__ = "0.1.0"
