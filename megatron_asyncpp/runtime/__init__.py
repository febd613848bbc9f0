"""Executes a plan: its actions with Megatron's own functions, its weight versions, its optimizer step."""
