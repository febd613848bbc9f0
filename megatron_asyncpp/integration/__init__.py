"""Where the plugin meets Megatron: patch records and what they install."""
