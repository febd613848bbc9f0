"""What a run will take, in closed form and pure Python: neither torch nor Megatron is imported here."""
